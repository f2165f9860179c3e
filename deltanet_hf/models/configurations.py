"""The configuration classes of all converted models; importing this module registers them with AutoConfig.

transformers' Auto classes may import it at any moment (`registration.py`), also in the middle of an import of another
module of this package. So what it imports at its top is neither layers nor models, and imports no Auto classes. The
models' files take the configuration classes from transformers' `CONFIG_MAPPING`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from deltanet_hf.model_types import QWEN3_5_MODEL, QWEN3_5_TYPE
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.peft_defaults import register_peft_defaults
from deltanet_hf.models.shim import no_code_beside_the_shim, write_shim

if TYPE_CHECKING:
    from deltanet_hf.models.layers import LayerTable


def _tensor_parallel_plan(plan: dict[str, str] | None, softmax: list[int]) -> dict[str, str] | None:
    """The teacher's plan for the layers in `softmax`; it would shard the others' projections by the wrong heads."""
    if plan is None:
        return None
    rewritten: dict[str, str] = {}
    for pattern, style in plan.items():
        if pattern.startswith("layers.*.self_attn."):
            rewritten |= {pattern.replace("*", str(i), 1): style for i in softmax}
        else:
            rewritten[pattern] = style
    return rewritten


@functools.cache
def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The configuration class of a converted family, by the teacher's `model_type`."""
    family = FAMILIES[model_type]
    base = family.config_class

    def __post_init__(self: Any, **kwargs: Any) -> None:
        from deltanet_hf.models.factory import model_class
        from deltanet_hf.models.layers import LayerTable

        base.__post_init__(self, **kwargs)
        if self.deltanet is None:
            self.deltanet = LayerTable.preset(self.num_hidden_layers, teacher=self).to_dict()
        self.base_model_tp_plan = _tensor_parallel_plan(base.base_model_tp_plan, LayerTable.of(self).softmax)
        model_class(model_type)  # whoever has a configuration may ask AutoModelForCausalLM for the model

    def from_dict(cls: Any, /, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if not config_dict.get("deltanet") and not kwargs.get("deltanet"):
            raise ValueError(
                "deltanet: missing key in config.json, which says what the layers are; copy config.json of the "
                "converted model again, or convert again"
            )
        return base.from_dict.__func__(cls, config_dict, **kwargs)  # type: ignore[attr-defined]

    def to_dict(self: Any) -> dict[str, Any]:
        register_peft_defaults()
        return base.to_dict(self)

    def save_pretrained(self: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        self.auto_map = write_shim(save_directory, type(self).__name__, family.converted_model_name)
        base.save_pretrained(self, save_directory, *args, **kwargs)

    name = f"DeltaNet{base.__name__}"
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{base.__name__} with a `deltanet` entry (`LayerTable`): which kind of layer stands where.",
        "__annotations__": {"deltanet": dict | None},
        "deltanet": None,
        "model_type": family.converted_model_type,
        "__post_init__": __post_init__,
        "from_dict": classmethod(from_dict),  # type: ignore[arg-type]
        "to_dict": to_dict,
        "save_pretrained": save_pretrained,
        "register_for_auto_class": no_code_beside_the_shim,
    }
    return type(name, (base,), namespace)


class DeltaNetQwen3_5TextConfig(Qwen3_5TextConfig):
    """Qwen3_5TextConfig whose linear layers are this project's.

    `deltanet` follows from `layer_types`, except for its `cache_bits`.
    """

    model_type = QWEN3_5_TYPE
    deltanet: dict | None = None
    register_for_auto_class = no_code_beside_the_shim

    def __post_init__(self, **kwargs: Any) -> None:
        from deltanet_hf.models.layers import LayerTable
        from deltanet_hf.models.qwen3_5 import model_class

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
        from deltanet_hf.mixers.gated_deltanet import QWEN3_5, GatedDeltaNet
        from deltanet_hf.models.layers import SOFTMAX, Kind, LayerTable

        settings = GatedDeltaNet.Settings(**{**QWEN3_5, "conv_size": self.linear_conv_kernel_dim})
        types = self.layer_types or []
        layers = tuple("linear" if kind == "linear_attention" else SOFTMAX for kind in types)
        return LayerTable({"linear": Kind(GatedDeltaNet, settings)}, layers)

    def to_dict(self) -> dict[str, Any]:
        register_peft_defaults()
        return super().to_dict()

    def save_pretrained(self, save_directory: str | PathLike, *args: Any, **kwargs: Any) -> None:
        self.auto_map = write_shim(str(save_directory), type(self).__name__, QWEN3_5_MODEL, "qwen3_5")
        super().save_pretrained(save_directory, *args, **kwargs)


def __getattr__(name: str) -> Any:
    """The made classes by name, for pickling."""
    for model_type, family in FAMILIES.items():
        if name == f"DeltaNet{family.config_name}":
            return config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def config_classes() -> Iterator[type[PreTrainedConfig]]:
    """The configurations of all converted families."""
    yield from map(config_class, FAMILIES)
    yield DeltaNetQwen3_5TextConfig


for _class in config_classes():
    AutoConfig.register(_class.model_type, _class)
