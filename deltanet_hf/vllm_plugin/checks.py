"""Adapts a converted model's configuration to vLLM, and refuses what the plugin does not serve."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from deltanet_hf.mixers import AttentionKind
from deltanet_hf.models.layers import LayerTable

OWN_TYPES = "family_layer_types"  # key of a configuration in vLLM: the family's `layer_types`
CONVERTED = "linear_attention"  # how vLLM calls a layer with a state


class Checks(VerifyAndUpdateConfig):
    """What vLLM calls when it has read a configuration."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Tell vLLM by `layer_types` which layers keep states: it takes a model with attention only for no hybrid.

        Raises:
            ValueError: a kind of layer that is not served.
        """
        config: Any = model_config.hf_config
        if hasattr(config, OWN_TYPES):
            return
        table = LayerTable.of(config)
        for index, kind in table.converted.items():
            if issubclass(kind.mixer, AttentionKind):
                raise ValueError(
                    f"deltanet.layers: layer {index} is {kind.mixer.title}, which keeps something of every token beside "
                    "keys and values and is not served by vLLM; use deltanet-hf generate or transformers serve"
                )
        own = getattr(config, "layer_types", None)
        types = list(own or ["full_attention"] * len(table))
        for index in table.converted:
            types[index] = CONVERTED
        setattr(config, OWN_TYPES, own)
        config.layer_types = types

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Raises ValueError for settings of vLLM that the plugin does not serve."""
        parallel = vllm_config.parallel_config
        for given, name, remedy in (
            (parallel.tensor_parallel_size > 1, "tensor_parallel_size", "1, and --data-parallel-size for several GPUs"),
            (parallel.pipeline_parallel_size > 1, "pipeline_parallel_size", "1"),
            (vllm_config.quant_config is not None, "quantization", "none"),
            (vllm_config.lora_config is not None, "enable_lora", "false, and a model with merged adapters"),
            (vllm_config.speculative_config is not None, "speculative_config", "none"),
        ):
            if given:
                raise ValueError(f"{name}: not served for models with converted layers; pass {remedy}")


def family_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration in vLLM, with the family's own `layer_types` again."""
    own = copy.deepcopy(config)
    own.layer_types = getattr(config, OWN_TYPES)  # type: ignore[attr-defined]
    return own
