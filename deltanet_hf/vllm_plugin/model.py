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
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.transformers import TransformersForCausalLM, base
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.mixers.layer.layer_kind import branches_of, own_kind
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.model_types import family_type
from deltanet_hf.models import factory, qwen3_5
from deltanet_hf.models.cache_bits import KEY_ORDER
from deltanet_hf.models.configurations import config_classes
from deltanet_hf.vllm_plugin.cache import packed_bytes, share_pages, state_page_bytes
from deltanet_hf.vllm_plugin.checks import family_config
from deltanet_hf.vllm_plugin.layer import ServedLayer, served


class DeltaNetForCausalLM(TransformersForCausalLM, HasInnerState, IsHybrid):
    """A converted model of any family."""

    config: Any
    text_config: Any

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.logits_processor.soft_cap = getattr(self.text_config, "final_logit_softcapping", None)  # not so in 0.25
        divisor = getattr(self.text_config, "logits_scaling", 1.0)  # of Granite
        self.logits_processor.scale /= divisor

    def _patch_config(self) -> None:
        self.config = self.text_config = family_config(self.config)
        super()._patch_config()

    def _decorate_for_torch_compile(self, **kwargs: Any) -> None:
        """Nothing is compiled, see `Checks`; and the family's class stays as transformers made it."""

    def recursive_replace(self) -> None:
        settings = get_current_vllm_config()
        aside = dict(_own("model.layers", self.model.layers))
        for name in aside:
            self._put(name, nn.Identity())
        super().recursive_replace()
        for name, part in aside.items():
            _make_loadable(part)
            self._put(name, served(part, name, settings))
        share_pages(settings)
        self.hf_to_vllm_mapper |= WeightsMapper(orig_to_new_prefix={f"{name}.": f"{name}.layer." for name in aside})

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self.get_submodule(parent), own, module)

    def create_attention_instances(self) -> dict[int, Attention]:
        """vLLM's attention for the layers that stayed softmax, by their indices; vLLM 0.25 passes it to their calls.

        Raises:
            ValueError: attention with learned sinks, whose weights vLLM 0.25 would not load.
        """
        if any(hasattr(module, "sinks") for _, _, module in self._softmax_layers()):
            raise ValueError("vllm: softmax layers with learned sinks (gpt_oss) need 0.32; pip install vllm==0.32.0")
        return {index: self._attention(index, name, module) for index, name, module in self._softmax_layers()}

    def _create_attention_instances(self, prefix: str = "") -> None:
        """The same where newer versions look for it: in the layers."""
        for index, name, module in self._softmax_layers():
            setattr(module, base.VLLM_ATTN_ATTR, self._attention(index, maybe_prefix(prefix, name), module))

    def _softmax_layers(self) -> Iterator[tuple[int, str, Any]]:
        """Index, name and module of the attention that vLLM's attention serves: whole layers, or some heads of one."""
        for index, layer in enumerate(self.model.layers):
            for branch, module in branches_of(layer.self_attn).items() if hasattr(layer, "self_attn") else ():
                if not isinstance(module, ServedLayer):
                    yield index, ".".join(filter(None, (f"model.layers.{index}.self_attn", branch))), module

    def _attention(self, index: int, name: str, module: Any) -> Attention:
        sinks = getattr(module, "sinks", None)
        return Attention(
            num_heads=module.config.num_attention_heads,  # of some heads only, in layers with mixed heads
            head_size=module.head_dim,
            scale=getattr(module, "scaling", module.head_dim**-0.5),
            num_kv_heads=module.config.num_key_value_heads,
            cache_config=self.cache_config,
            logits_soft_cap=getattr(self.text_config, "attn_logit_softcapping", None),
            per_layer_sliding_window=sliding_window(self.text_config, index),
            prefix=f"{name}.attn",
            **({} if sinks is None else {"sinks": sinks}),
        )

    def init_parameters(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """As in the base class, with the parameters in float32 that are so whatever the model's dtype, and indices."""
        super().init_parameters(module, dtype)
        for name, parameter in module.named_parameters():
            if name.rpartition(".")[2] in FLOAT32_NAMES:
                parameter.data = parameter.data.float()
            elif name.rpartition(".")[2] == KEY_ORDER:
                places = torch.arange(parameter.shape[-1], device=parameter.device)
                parameter.data = places.expand(parameter.shape).contiguous()

    # What vLLM's cache asks of a model with states.

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The page of a state, once the model has been built.

        vLLM makes pages of so many tokens that they hold it in the model's dtype. Packed tokens are smaller, so more of
        them have to fill a page.
        """
        size, packed, model = state_page_bytes(vllm_config), packed_bytes(vllm_config), vllm_config.model_config
        if packed:
            heads = model.get_num_kv_heads(vllm_config.parallel_config)
            size = -(-size // packed) * 2 * heads * model.get_head_size() * model.dtype.itemsize
        return ((size,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """How prefix caching copies a page."""
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()


def _make_loadable(part: Any) -> None:
    """Key orders as parameters: vLLM loads no buffers."""
    for module in part.modules():
        order = module._buffers.pop(KEY_ORDER, None)
        if order is not None:
            module.register_parameter(KEY_ORDER, nn.Parameter(order, requires_grad=False))


def _own(prefix: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers in a module that are not vLLM's, and such branches of those with mixed heads, with their names."""
    for name, part in module.named_children():
        kind = own_kind(part)
        if kind is not None and kind.branches.get("") is part:
            yield f"{prefix}.{name}", part
        else:
            yield from _own(f"{prefix}.{name}", part)


class Decoder:
    """Makes a converted model's decoder where vLLM asks `AutoModel` for it."""

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
        if config.model_type == qwen3_5.MODEL_TYPE:
            made = qwen3_5.model_class()
        else:
            made = factory.model_class(family_type(config))
        decoder: Any = made._from_config(config, **kwargs).model
        decoder._forward_pre_hooks.clear()  # they read padding and packing off calls, and vLLM knows its sequences
        decoder._forward_pre_hooks_with_kwargs.clear()
        return decoder  # type: ignore[no-any-return]


for _config_class in config_classes():
    AutoModel.register(_config_class, Decoder, exist_ok=True)
