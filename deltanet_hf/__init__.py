"""Gated DeltaNet models made from pretrained softmax models, for Hugging Face transformers.

Importing this package registers every converted family with `AutoConfig` and `AutoModelForCausalLM`. It imports neither
torch nor transformers (`registration.py`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltanet_hf.registration import register_with_auto_classes
from deltanet_hf.version import __version__
from deltanet_kernels.installed_versions import require

if TYPE_CHECKING:
    from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits
    from deltanet_hf.models.factory import converted_config
    from deltanet_hf.models.layers import LayerTable
    from deltanet_hf.models.restrict import restrict_heads, restrict_to_window

require("torch", "transformers", "triton")
register_with_auto_classes()

__all__ = [
    "LayerTable",
    "__version__",
    "cache_bits_of",
    "converted_config",
    "restrict_heads",
    "restrict_to_window",
    "set_cache_bits",
]

_MODULES = {
    "LayerTable": "deltanet_hf.models.layers",
    "cache_bits_of": "deltanet_hf.models.cache_bits",
    "converted_config": "deltanet_hf.models.factory",
    "restrict_heads": "deltanet_hf.models.restrict",
    "restrict_to_window": "deltanet_hf.models.restrict",
    "set_cache_bits": "deltanet_hf.models.cache_bits",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
