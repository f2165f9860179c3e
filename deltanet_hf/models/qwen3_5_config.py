"""Configuration of models that are Gated DeltaNet from birth: Qwen3.5's text models (`qwen3_5.py`)."""

from __future__ import annotations

import sys
from os import PathLike
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from deltanet_hf.mixers.gated_deltanet import QWEN3_5, GatedDeltaNet
from deltanet_hf.models.layers import SOFTMAX, Kind, LayerTable
from deltanet_hf.models.peft_defaults import register_peft_defaults
from deltanet_hf.models.shim import write_shim

MODEL_TYPE = "deltanet_qwen3_5_text"
MODEL_NAME = "DeltaNetQwen3_5ForCausalLM"


class DeltaNetQwen3_5TextConfig(Qwen3_5TextConfig):
    """Qwen3_5TextConfig whose linear layers are this project's. `deltanet` follows from `layer_types`."""

    model_type = MODEL_TYPE
    deltanet: dict | None = None

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
        self.deltanet = LayerTable.of(self).to_dict()
        if self.deltanet != implied:
            raise ValueError(
                f"deltanet: got {self.deltanet}, expected {implied}, which layer_types and the sizes imply"
            )
        plan = Qwen3_5TextConfig.base_model_tp_plan or {}
        # Its styles are for the fused projections.
        plan = {name: style for name, style in plan.items() if ".linear_attn." not in name}
        self.base_model_tp_plan = plan  # type: ignore[misc]
        import deltanet_hf.models.qwen3_5  # noqa: F401  (registers the model, as the first use of a family does)

    def _implied_table(self) -> LayerTable:
        settings = GatedDeltaNet.Settings(**{**QWEN3_5, "conv_size": self.linear_conv_kernel_dim})
        types = self.layer_types or []
        layers = tuple("linear" if kind == "linear_attention" else SOFTMAX for kind in types)
        return LayerTable({"linear": Kind(GatedDeltaNet, settings)}, layers)

    def to_dict(self) -> dict[str, Any]:
        if "peft" in sys.modules:  # PEFT reads this dictionary before it looks for a model's default targets
            register_peft_defaults()
        return super().to_dict()

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        self.auto_map = write_shim(str(save_directory), type(self).__name__, MODEL_NAME, "qwen3_5")
        super().save_pretrained(save_directory, *args, **kwargs)


def register_qwen3_5() -> None:
    """Register the configuration with AutoConfig; it registers the model when the first one is made."""
    AutoConfig.register(MODEL_TYPE, DeltaNetQwen3_5TextConfig)


def register_model(model: Any) -> None:
    """Register the model class with AutoModelForCausalLM."""
    AutoModelForCausalLM.register(DeltaNetQwen3_5TextConfig, model)
