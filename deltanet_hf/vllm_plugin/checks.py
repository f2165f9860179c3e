"""Adapts a converted model's configuration to vLLM, and refuses what the plugin does not serve."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig
from vllm.config import CompilationMode, CUDAGraphMode, ModelConfig, VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from deltanet_hf.mixers import LayerKind
from deltanet_hf.models.layers import LayerTable
from deltanet_kernels.packed_cache.layout import PACKED_BITS

SERVED_BITS = (16, *PACKED_BITS)
OWN_TYPES = "family_layer_types"  # key of a configuration in vLLM: the family's `layer_types`


class Checks(VerifyAndUpdateConfig):
    """vLLM calls this when it has read a configuration."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Name the layers that keep states in `layer_types`, by which vLLM knows a hybrid, which is not all attention.

        Graphs are off where the family's own code reads numbers on the host.
        """
        config: Any = model_config.hf_config
        if hasattr(config, OWN_TYPES):
            return
        own, table = getattr(config, "layer_types", None), LayerTable.of(config)
        states = [index for index, kind in table.converted.items() if _has_state(kind.mixer)]
        if table.cache_bits < 16:  # softmax layers too: the tokens that are not packed yet
            states = list(range(len(table)))
        types = list(own or ["full_attention"] * len(table)) if states else ["attention"] * len(table)
        for index in states:
            types[index] = "linear_attention"
        setattr(config, OWN_TYPES, own)
        config.layer_types = types
        if model_config.get_num_experts() or _rope_types(config) & {"dynamic", "longrope"}:
            model_config.enforce_eager = True

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Let CUDA graphs have the steps with one token per sequence if that mode is asked for; nothing is compiled.

        Raises:
            ValueError: a setting of vLLM that the plugin does not serve.
        """
        parallel, table = vllm_config.parallel_config, LayerTable.of(vllm_config.model_config.hf_config)
        for given, name, remedy in (
            (parallel.tensor_parallel_size > 1, "tensor_parallel_size", "1"),
            (parallel.pipeline_parallel_size > 1, "pipeline_parallel_size", "1"),
            (vllm_config.quant_config is not None, "quantization", "none"),
            (vllm_config.lora_config is not None, "enable_lora", "false, and a model with merged adapters"),
            (_unserved_drafts(vllm_config, table), "speculative_config", "none, or the method ngram (not with path)"),
            (table.cache_bits not in SERVED_BITS, "cache_bits", "a model with 16, 8 or 4"),
            (table.positions is not None, "positions", "a model that was converted without --context"),
        ):
            if given:
                raise ValueError(f"{name}: not served for models with converted layers; pass {remedy}")
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.NONE
        drafts = vllm_config.speculative_config is not None
        if drafts or compilation.cudagraph_mode != CUDAGraphMode.FULL_DECODE_ONLY:
            compilation.cudagraph_mode = CUDAGraphMode.NONE


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings of all layers."""
    found: Any = getattr(config, "rope_parameters", None) or {}
    return {some["rope_type"] for some in (found, *found.values()) if isinstance(some, dict) and "rope_type" in some}


def _unserved_drafts(vllm_config: VllmConfig, table: LayerTable) -> bool:
    """Whether tokens are drafted by other means than n-grams, or beside `path`, whose state has no page per draft."""
    drafts: Any = vllm_config.speculative_config
    if drafts is None:
        return False
    return drafts.method != "ngram" or any(kind.mixer.state_beside_keys for kind in table.converted.values())


def _has_state(kind: type[LayerKind]) -> bool:
    return kind.state_beside_keys or not kind.keeps_all_tokens


def family_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a configuration in vLLM, with the family's own `layer_types` again."""
    own = copy.deepcopy(config)
    own.layer_types = getattr(config, OWN_TYPES)  # type: ignore[attr-defined]
    return own
