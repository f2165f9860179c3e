"""Models that are Gated DeltaNet from birth: Qwen3.5's text model, with this project's layer in its linear layers.

Such a checkpoint has gated softmax attention in its other layers, so the base class is `Qwen3_5ForCausalLM` itself and
only `layers[i].linear_attn` is replaced. What is gained: these kernels, LoRA on q, k and v apart, packing, left padding
and a cache that counts tokens. `deltanet-hf convert` renames the weights (convert/deltanet_convert/export).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_hf.mixers.base import AttentionShape
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.masks import announce_packing
from deltanet_hf.mixers.parts import Part
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.qwen3_5_config import DeltaNetQwen3_5TextConfig, register_model

__all__ = ["DeltaNetQwen3_5ForCausalLM", "DeltaNetQwen3_5TextConfig"]


class LinearAttention(GatedDeltaNet):
    """Gated DeltaNet with the signature of `linear_attn`."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        cache_params: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states [B, T, hidden] -> [B, T, hidden]."""
        output, _ = super().forward(hidden_states, None, attention_mask, cache_params, **kwargs)
        return output


def _shape(config: DeltaNetQwen3_5TextConfig) -> AttentionShape:
    """Qwen3.5's head counts: value heads share query and key heads."""
    return AttentionShape(
        hidden_size=config.hidden_size,
        head_dim=config.linear_value_head_dim,
        num_q_heads=config.linear_num_key_heads,
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        norm_eps=config.rms_norm_eps,
    )


class DeltaNetQwen3_5ForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3_5ForCausalLM whose linear layers are this project's Gated DeltaNet."""

    config_class = DeltaNetQwen3_5TextConfig
    _is_stateful = True
    _keep_in_fp32_modules_strict = list(GatedDeltaNet.fp32)  # noqa: RUF012

    def __init__(self, config: DeltaNetQwen3_5TextConfig) -> None:
        super().__init__(config)
        for index, kind in LayerTable.of(config).converted.items():
            self.model.layers[index].linear_attn = LinearAttention(_shape(config), kind.settings, index)
        self.model.register_forward_pre_hook(announce_packing, with_kwargs=True)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Part):
            module.reset_parameters()
        else:
            super()._init_weights(module)


register_model(DeltaNetQwen3_5ForCausalLM)
