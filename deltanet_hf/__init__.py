"""Gated DeltaNet models made from pretrained softmax models, for Hugging Face transformers.

Importing this package registers every converted family with `AutoConfig` and `AutoModelForCausalLM`.
"""

from deltanet_hf.models.factory import converted_config, register
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.qwen3_5_config import register_qwen3_5

register()
register_qwen3_5()

__all__ = ["LayerTable", "converted_config"]
__version__ = "0.1.0"
