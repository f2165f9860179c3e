"""Lists the rotary embeddings that other runtimes compute as transformers does.

Those in `SAME` were compared by log-probabilities (tests/convert/test_export_runtimes.py). In this architecture,
llama.cpp has no factors per frequency, which Llama 3's embedding requires, and supports only the default ramp of yarn.
No runtime reads yarn's `attention_factor` or `truncate` as transformers does.
"""

from __future__ import annotations

from typing import Any

SAME: dict[str, dict[str, set[str]]] = {  # format -> rope_type -> keys that the runtime reads
    "mlx": {
        "default": set(),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
    },
    "gguf": {
        "default": set(),
        "linear": {"factor"},
        "yarn": {"factor", "original_max_position_embeddings"},
    },
}
WRITTEN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


def unlike_transformers(rope: dict[str, Any]) -> tuple[str, ...]:
    """The formats in `SAME` whose runtime is not known to compute the given `rope_parameters` correctly."""
    return tuple(style for style in SAME if _differs(style, rope))


def _differs(style: str, rope: dict[str, Any]) -> bool:
    read = SAME[style].get(rope.get("rope_type", "default"))
    set_here = {key for key, value in rope.items() if value is not None and value != DEFAULTS.get(key)}
    return read is None or not set_here <= read | WRITTEN
