"""Serves converted models with vLLM, whose entry point `vllm.general_plugins` calls `register`.

Only vLLM imports this package. It takes vLLM's backend for models of transformers, so that every family is served by
its own modelling code with vLLM's linear layers, norms, embeddings and paged attention; converted layers are this
project's own modules, whose states lie in pages of vLLM's cache. docs/serving.md has the limits.
"""

import logging

from deltanet_hf.models import qwen3_5
from deltanet_hf.models.families import FAMILIES

logger = logging.getLogger(__name__)

ARCHITECTURES = (*(family.converted_model_name for family in FAMILIES.values()), qwen3_5.MODEL_NAME)


def register() -> None:
    """Make every converted family known to vLLM; vLLM calls it in each of its processes.

    A version of vLLM without the parts that the plugin builds on serves all other models as before.
    """
    try:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.model_executor.models.registry import ModelRegistry

        from deltanet_hf.vllm_plugin.checks import Checks
    except ImportError as error:
        logger.warning("deltanet-hf serves converted models with vLLM 0.25 to 0.32, not with this one: %s", error)
        return
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, "deltanet_hf.vllm_plugin.model:DeltaNetForCausalLM")
        MODELS_CONFIG_MAP[architecture] = Checks
