"""Gated DeltaNet models made from pretrained softmax models, for Hugging Face transformers.

Importing this package registers every converted family with `AutoConfig` and `AutoModelForCausalLM`.
"""

from deltanet_hf.config import DeltaNetOptions
from deltanet_hf.modeling import converted_config

__all__ = ["DeltaNetOptions", "converted_config"]
__version__ = "0.1.0"
