"""Models that are Gated DeltaNet from birth: Qwen3.5's text model, with this project's layer in its linear layers.

Such a checkpoint has gated softmax attention in its other layers, so the base class is `Qwen3_5ForCausalLM` itself and
only `layers[i].linear_attn` is replaced. What is gained: these kernels, LoRA on q, k and v apart, packing, left padding
and a cache that counts tokens. `deltanet-hf import` renames the weights (convert/deltanet_convert/export).

Qwen3.5's modelling code is imported when the first configuration is made, as in `factory.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from os import PathLike
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from deltanet_hf.decoding.generation import GraphedGeneration
from deltanet_hf.fast import with_fast_form
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.gated_deltanet import QWEN3_5, GatedDeltaNet
from deltanet_hf.mixers.layer.attention_shape import AttentionShape
from deltanet_hf.models import auto_classes
from deltanet_hf.models.assisted import AssistedGeneration
from deltanet_hf.models.cache_bits import use_cache_bits
from deltanet_hf.models.hub_repository import upload_with_companions
from deltanet_hf.models.layers import SOFTMAX, Kind, LayerTable
from deltanet_hf.models.peft_defaults import register_peft_defaults
from deltanet_hf.models.shim import name_in_transformers, no_code_beside_the_shim, write_shim
from deltanet_hf.models.start_values import initialize
from deltanet_hf.models.stateful import Stateful, announce

MODEL_TYPE = "deltanet_qwen3_5_text"
MODEL_NAME = "DeltaNetQwen3_5ForCausalLM"


class DeltaNetQwen3_5TextConfig(Qwen3_5TextConfig):
    """Qwen3_5TextConfig whose linear layers are this project's.

    `deltanet` follows from `layer_types`, except for its `cache_bits`.
    """

    model_type = MODEL_TYPE
    deltanet: dict | None = None
    register_for_auto_class = no_code_beside_the_shim

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.linear_key_head_dim != self.linear_value_head_dim:
            raise ValueError(
                f"linear_key_head_dim: got {self.linear_key_head_dim}, expected linear_value_head_dim "
                f"({self.linear_value_head_dim}): one head size for keys and values"
            )
        implied = self._implied_table().to_dict()
        if self.deltanet is None:
            self.deltanet = implied
        table = LayerTable.of(self)
        self.deltanet = table.to_dict()
        if dataclasses.replace(table, cache_bits=16).to_dict() != implied:
            raise ValueError(
                f"deltanet: got {self.deltanet}, expected {implied}, which layer_types and the sizes imply"
            )
        plan = Qwen3_5TextConfig.base_model_tp_plan or {}
        # Its styles are for the fused projections.
        plan = {name: style for name, style in plan.items() if ".linear_attn." not in name}
        self.base_model_tp_plan = plan  # type: ignore[misc]
        model_class()  # whoever has a configuration may ask AutoModelForCausalLM for the model

    def _implied_table(self) -> LayerTable:
        settings = GatedDeltaNet.Settings(**{**QWEN3_5, "conv_size": self.linear_conv_kernel_dim})
        types = self.layer_types or []
        layers = tuple("linear" if kind == "linear_attention" else SOFTMAX for kind in types)
        return LayerTable({"linear": Kind(GatedDeltaNet, settings)}, layers)

    def to_dict(self) -> dict[str, Any]:
        register_peft_defaults()
        return super().to_dict()

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        self.auto_map = write_shim(str(save_directory), type(self).__name__, MODEL_NAME, "qwen3_5")
        super().save_pretrained(save_directory, *args, **kwargs)


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


def register() -> None:
    """Register the configuration with transformers' Auto classes."""
    auto_classes.register(DeltaNetQwen3_5TextConfig)
