"""Gated DeltaNet models made from pretrained softmax models, for Hugging Face transformers.

Importing this package registers every converted family with `AutoConfig` and `AutoModelForCausalLM`.
"""

from deltanet_kernels.installed_versions import require

require("torch", "transformers", "triton")

from deltanet_hf.models import factory, qwen3_5
from deltanet_hf.models.factory import converted_config
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.version import __version__

factory.register()
qwen3_5.register()

__all__ = ["LayerTable", "__version__", "converted_config"]
