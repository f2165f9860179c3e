"""A selection of key/value heads that stay softmax, as `deltanet-hf select --unit kv_head` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError

FORMAT = "deltanet-hf selection 1"
MAX_BYTES = 20_000_000


def selected_heads(spec: str, config: PreTrainedConfig) -> frozenset[tuple[int, int]] | None:
    """The (layer, key/value head) pairs that stay softmax, if `spec` names a selection of heads; otherwise None.

    Args:
        spec: the value of `--layers`.
        config: the teacher's.

    Raises:
        UserError: the selection was made for another model, or its heads make no sense.
    """
    path = Path(spec).expanduser()
    value = _contents(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("unit") != "kv_head":
        return None
    where = f"--layers {path}"
    for key in ("model_type", "num_hidden_layers", "num_key_value_heads"):
        if value.get(key) != getattr(config, key):
            raise UserError(
                f"{where}: key '{key}' is {value.get(key)!r}, the teacher's is {getattr(config, key)!r}; give the "
                "selection that was made for this teacher"
            )
    layers, heads = int(config.num_hidden_layers), int(config.num_key_value_heads)
    kept = value.get("kept")
    if not isinstance(kept, list) or not kept:
        raise UserError(f"{where}: key 'kept' lists no head; say --layers all to convert every layer")
    for pair in kept:
        if not isinstance(pair, list) or len(pair) != 2 or any(type(part) is not int for part in pair):
            raise UserError(f"{where}: key 'kept' holds {pair!r:.60}, expected [layer, key/value head]")
        if not (0 <= pair[0] < layers and 0 <= pair[1] < heads):
            raise UserError(f"{where}: key 'kept' holds {pair!r}, which the teacher does not have")
    found = frozenset((layer, head) for layer, head in kept)
    if len(found) != len(kept):
        raise UserError(f"{where}: key 'kept' lists a head twice; list each once")
    if len(found) == layers * heads:
        raise UserError(f"{where}: keeps all {len(found)} heads; leave at least one to convert")
    return found


def _contents(path: Path) -> Any:
    """The file's JSON value; None for what is no such file, which the reader of lists of layers reports."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
