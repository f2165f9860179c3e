"""Converted models in vLLM, on its backend for models of transformers.

The backend takes the family's own decoder, puts vLLM's layers in the place of embeddings, linear layers and norms, and
sends softmax attention to vLLM's paged cache. Here the converted layers are set aside while it does so: they stay the
project's own modules and get states in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from deltanet_hf.mixers import FLOAT32_NAMES, LayerKind
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models import factory, qwen3_5
from deltanet_hf.models.families import FAMILIES, PREFIX
from deltanet_hf.vllm_plugin.cache import set_page_bytes, state_pages
from deltanet_hf.vllm_plugin.checks import family_config
from deltanet_hf.vllm_plugin.layer import served


class DeltaNetForCausalLM(TransformersForCausalLM, HasInnerState, IsHybrid):
    """A converted model of any family."""

    config: Any
    text_config: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        divisor = getattr(self.text_config, "logits_scaling", 1.0)  # of Granite
        self.logits_processor.scale /= divisor

    def _patch_config(self) -> None:
        self.config = self.text_config = family_config(self.config)
        super()._patch_config()

    def _decorate_for_torch_compile(self) -> None:
        """Nothing is compiled, see `Checks`; and the family's class stays as transformers made it."""

    def recursive_replace(self) -> None:
        aside = dict(_converted("model.layers", self.model.layers))
        for name in aside:
            self._put(name, nn.Identity())
        super().recursive_replace()
        for name, part in aside.items():
            self._put(name, served(part, name, self.vllm_config))
        set_page_bytes(self.vllm_config)
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={f"{name}.": f"{name}.layer." for name in aside})

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self.get_submodule(parent), own, module)

    def _create_attention_instances(self, prefix: str = "") -> None:
        """vLLM's attention for the layers that stayed softmax."""
        for index, (name, fuser) in self.attention_fusers.items():
            module: Any = self.get_submodule(name)
            scale, sinks = fuser.scale(module), fuser.sinks(module)
            attention = Attention(
                num_heads=module.config.num_attention_heads,  # of some heads only, in layers with mixed heads
                head_size=module.head_dim,
                scale=module.head_dim**-0.5 if scale is None else scale,
                num_kv_heads=module.config.num_key_value_heads,
                cache_config=self.cache_config,
                logits_soft_cap=getattr(self.text_config, "attn_logit_softcapping", None),
                per_layer_sliding_window=sliding_window(self.text_config, index),
                prefix=maybe_prefix(prefix, f"{name}.{VLLM_ATTN_ATTR}"),
                **({} if sinks is None else {"sinks": sinks}),
            )
            setattr(module, VLLM_ATTN_ATTR, attention)

    # What vLLM's cache asks of a model with states.

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The page of a state, once the model has been built."""
        return ((max((cache.page_bytes for cache in state_pages(vllm_config)), default=0),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """How prefix caching copies a page."""
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()


def _converted(prefix: str, module: nn.Module) -> Iterator[tuple[str, LayerKind]]:
    """The converted layers in a module, and the branches of those with mixed heads, with their names."""
    for name, part in module.named_children():
        if isinstance(part, LayerKind) and part.branches.get("") is part:
            yield f"{prefix}.{name}", part
        else:
            yield from _converted(f"{prefix}.{name}", part)


class Decoder:
    """Makes a converted model's decoder where vLLM asks `AutoModel` for it."""

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
        if config.model_type == qwen3_5.MODEL_TYPE:
            made = qwen3_5.model_class()
        else:
            made = factory.model_class(config.model_type.removeprefix(PREFIX))
        decoder: Any = made._from_config(config, **kwargs).model
        decoder._forward_pre_hooks.clear()  # they read padding and packing off calls, and vLLM knows its sequences
        decoder._forward_pre_hooks_with_kwargs.clear()
        # Whole names, because vLLM looks for them anywhere in a name.
        names = [name for name, _ in decoder.named_parameters() if name.rpartition(".")[2] in FLOAT32_NAMES]
        decoder._keep_in_fp32_modules_strict = names
        return decoder  # type: ignore[no-any-return]


for _config_class in (*map(factory.config_class, FAMILIES), qwen3_5.DeltaNetQwen3_5TextConfig):
    AutoModel.register(_config_class, Decoder, exist_ok=True)
