"""One factory for all families: `<Family>Config` and `<Family>ForCausalLM` with layers as a `LayerTable` says.

Weight names stay the teacher's, except inside the converted layers' `self_attn`. The saved `model_type` is
`deltanet_<family>`, so that a library without this plugin refuses the folder instead of running softmax attention.

A family's modelling code is imported when its first configuration (`configurations.py`) is made, not before.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from deltanet_hf.decoding.generation import GraphedGeneration
from deltanet_hf.fast import with_fast_form
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.models.assisted import AssistedGeneration
from deltanet_hf.models.cache_bits import add_key_order, use_cache_bits
from deltanet_hf.models.families import FAMILIES, caps_scores
from deltanet_hf.models.far_positions import place_positions
from deltanet_hf.models.hub_repository import upload_with_companions
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.shim import name_in_transformers, no_code_beside_the_shim
from deltanet_hf.models.start_values import initialize
from deltanet_hf.models.stateful import Stateful, announce


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The configuration class of a converted family, by the teacher's `model_type`."""
    return CONFIG_MAPPING[FAMILIES[model_type].converted_model_type]  # type: ignore[no-any-return]


@functools.cache
def model_class(model_type: str) -> type[PreTrainedModel]:
    """The model class of a converted family, by the teacher's `model_type`; registers it with transformers."""
    family = FAMILIES[model_type]
    base = family.model_class

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        table = LayerTable.of(config)
        for index, kind in table.converted.items():
            layer = self.model.layers[index]
            layer.self_attn = kind.mixer.from_attention(layer.self_attn, config, index, kind.settings)
        announce(self.model)
        if table.positions is not None:
            place_positions(self, table.positions)
        if table.key_order:
            add_key_order(self)
        use_cache_bits(self, table.cache_bits)
        self.post_init()

    def initialize_weights(self: Any) -> None:
        initialize(self, base.initialize_weights)

    def can_set_experts_implementation(cls: Any) -> bool:  # transformers looks into the file of a class
        return bool(base._can_set_experts_implementation())

    name = family.converted_model_name
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{base.__name__} with layers as `config.deltanet` says (`LayerTable`).",
        "config_class": config_class(model_type),
        # Patterns of the last name: DeltaFormer has a module that is called as a parameter of Comba.
        "_keep_in_fp32_modules_strict": [rf"\.{name}$" for name in FLOAT32_NAMES],
        # transformers before 5.21 runs SDPA without the cap that the config demands.
        "_supports_sdpa": base._supports_sdpa and not caps_scores(family.config_class),
        "__init__": __init__,
        "_can_set_experts_implementation": classmethod(can_set_experts_implementation),
        "forward": with_fast_form(base.forward),
        "initialize_weights": initialize_weights,
        "register_for_auto_class": no_code_beside_the_shim,
        "_upload_modified_files": upload_with_companions,
    }
    made: Any = type(name, (AssistedGeneration, Stateful, GraphedGeneration, base), namespace)
    AutoModelForCausalLM.register(config_class(model_type), made)
    name_in_transformers(made)
    return made


def __getattr__(name: str) -> Any:
    """The made classes by name, for pickling and for the `trust_remote_code` shim."""
    for model_type, family in FAMILIES.items():
        if name == family.converted_model_name:
            return model_class(model_type)
        if name == f"DeltaNet{family.config_name}":
            return config_class(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def converted_config(teacher: PreTrainedConfig, table: LayerTable) -> PreTrainedConfig:
    """The converted model's config: everything of the teacher's, and the `deltanet` entry."""
    values = teacher.to_dict()
    if table.positions is not None:
        values["max_position_embeddings"] = table.positions.context
    for key in ("model_type", "architectures", "auto_map", "transformers_version"):
        values.pop(key, None)
    family = FAMILIES[teacher.model_type]
    made: Any = config_class(teacher.model_type)
    return made(**values, architectures=[family.converted_model_name], deltanet=table.to_dict())
