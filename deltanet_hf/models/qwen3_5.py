"""Models that are Gated DeltaNet from birth: Qwen3.5's text model, with this project's layer in its linear layers.

Such a checkpoint has gated softmax attention in its other layers, so the base class is `Qwen3_5ForCausalLM` itself and
only `layers[i].linear_attn` is replaced. What is gained: these kernels, LoRA on q, k and v apart, packing, left padding
and a cache that counts tokens. `deltanet-hf import` renames the weights (convert/deltanet_convert/export).

Qwen3.5's modelling code is imported when the first configuration is made, as in `factory.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from deltanet_hf.decoding.generation import GraphedGeneration
from deltanet_hf.fast import with_fast_form
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer.attention_shape import AttentionShape
from deltanet_hf.model_types import QWEN3_5_MODEL as MODEL_NAME
from deltanet_hf.model_types import QWEN3_5_TYPE as MODEL_TYPE
from deltanet_hf.models.assisted import AssistedGeneration
from deltanet_hf.models.cache_bits import use_cache_bits
from deltanet_hf.models.hub_repository import upload_with_companions
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.shim import name_in_transformers, no_code_beside_the_shim
from deltanet_hf.models.start_values import initialize
from deltanet_hf.models.stateful import Stateful, announce

if TYPE_CHECKING:
    from deltanet_hf.models.configurations import DeltaNetQwen3_5TextConfig
else:
    DeltaNetQwen3_5TextConfig = CONFIG_MAPPING[MODEL_TYPE]

__all__ = ["MODEL_NAME", "MODEL_TYPE", "DeltaNetQwen3_5TextConfig", "LinearAttention", "model_class"]


class LinearAttention(GatedDeltaNet):
    """Gated DeltaNet with the signature of `linear_attn`."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        cache_params: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states [B, T, hidden] -> [B, T, hidden]; the cache under Qwen3.5's name for it, or that of `Mixer`."""
        padding = kwargs.get("padding")
        if attention_mask is None and hidden_states.shape[1] == 1 and isinstance(padding, torch.Tensor):
            attention_mask = ~padding  # for one token transformers makes no mask
        if cache_params is not None:
            kwargs[CACHE] = cache_params
        kwargs["position_embeddings"] = None  # nothing is rotated
        output, _ = super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
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


@functools.cache
def model_class() -> type[PreTrainedModel]:
    """The class `DeltaNetQwen3_5ForCausalLM`; registers it with AutoModelForCausalLM."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    class DeltaNetQwen3_5ForCausalLM(  # type: ignore[misc]
        AssistedGeneration, Stateful, GraphedGeneration, Qwen3_5ForCausalLM
    ):
        """Qwen3_5ForCausalLM whose linear layers are this project's Gated DeltaNet."""

        config_class = DeltaNetQwen3_5TextConfig
        _keep_in_fp32_modules_strict = list(GatedDeltaNet.fp32)  # noqa: RUF012
        register_for_auto_class = no_code_beside_the_shim
        _upload_modified_files = upload_with_companions
        forward = with_fast_form(Qwen3_5ForCausalLM.forward)

        def __init__(self, config: DeltaNetQwen3_5TextConfig) -> None:
            super().__init__(config)
            table = LayerTable.of(config)
            for index, kind in table.converted.items():
                self.model.layers[index].linear_attn = LinearAttention(_shape(config), kind.settings, index)
            announce(self.model)
            use_cache_bits(self, table.cache_bits)
            self.post_init()

        def initialize_weights(self) -> None:
            initialize(self, Qwen3_5ForCausalLM.initialize_weights)

    DeltaNetQwen3_5ForCausalLM.__qualname__ = MODEL_NAME  # importable by name, for pickling and for the shim
    name_in_transformers(DeltaNetQwen3_5ForCausalLM)
    AutoModelForCausalLM.register(DeltaNetQwen3_5TextConfig, DeltaNetQwen3_5ForCausalLM)
    return DeltaNetQwen3_5ForCausalLM


def __getattr__(name: str) -> Any:
    if name == MODEL_NAME:
        return model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
