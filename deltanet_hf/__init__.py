"""Gated DeltaNet models made from pretrained softmax models, for Hugging Face transformers.

Importing this package registers every converted family with `AutoConfig` and `AutoModelForCausalLM`.
"""

import importlib.util

from deltanet_hf.config import DeltaNetOptions
from deltanet_hf.modeling import converted_config

if importlib.util.find_spec("peft") is not None:
    from deltanet_hf.peft_defaults import register_peft_defaults

    register_peft_defaults()

__all__ = ["DeltaNetOptions", "converted_config"]
__version__ = "0.1.0"
