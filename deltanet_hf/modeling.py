"""One factory for all families: `<Family>Config` and `<Family>ForCausalLM` whose chosen layers are Gated DeltaNet.

Weight names stay the teacher's, except inside the converted layers' `self_attn`. The saved `model_type` is
`deltanet_<family>`, so that a library without this plugin refuses the folder instead of running softmax attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from deltanet_hf.config import DeltaNetOptions
from deltanet_hf.families import FAMILIES, Family
from deltanet_hf.layer import GatedDeltaNet
from deltanet_hf.padding import announce_packing, announce_padding
from deltanet_hf.parts import DecayGate, GatedRMSNorm, ShortConv
from deltanet_hf.qwen3_5 import DeltaNetQwen3_5ForCausalLM, DeltaNetQwen3_5TextConfig
from deltanet_hf.shim import write_shim


def _tensor_parallel_plan(plan: dict[str, str] | None, config: PreTrainedConfig) -> dict[str, str] | None:
    """The teacher's plan without the converted layers, whose projections it would shard by the wrong heads."""
    if plan is None:
        return None
    softmax = sorted(set(range(config.num_hidden_layers)) - set(config.deltanet["layers"]))
    rewritten: dict[str, str] = {}
    for pattern, style in plan.items():
        if pattern.startswith("layers.*.self_attn."):
            rewritten |= {pattern.replace("*", str(i), 1): style for i in softmax}
        else:
            rewritten[pattern] = style
    return rewritten


def _make_config_class(family: Family) -> type[PreTrainedConfig]:
    base = family.config_class

    def __post_init__(self: Any, **kwargs: Any) -> None:
        base.__post_init__(self, **kwargs)
        if self.deltanet is None:
            self.deltanet = DeltaNetOptions.teacher(range(self.num_hidden_layers)).to_dict()
        options = DeltaNetOptions.from_dict(self.deltanet)
        if options.layers and max(options.layers) >= self.num_hidden_layers:
            raise ValueError(
                f"deltanet.layers: got index {max(options.layers)}, but the model has {self.num_hidden_layers} layers"
            )
        self.base_model_tp_plan = _tensor_parallel_plan(base.base_model_tp_plan, self)

    def save_pretrained(self: Any, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        self.auto_map = write_shim(save_directory, type(self).__name__, _model_name(family))
        base.save_pretrained(self, save_directory, *args, **kwargs)

    name = f"DeltaNet{base.__name__}"
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{base.__name__} with a `deltanet` entry (`DeltaNetOptions`): which layers, and how.",
        "__annotations__": {"deltanet": dict | None},
        "deltanet": None,
        "model_type": family.converted_model_type,
        "__post_init__": __post_init__,
        "save_pretrained": save_pretrained,
    }
    return type(name, (base,), namespace)


def _model_name(family: Family) -> str:
    return f"DeltaNet{family.model_name}"


def _make_model_class(family: Family, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    base = family.model_class

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        for index in config.deltanet["layers"]:
            layer = self.model.layers[index]
            layer.self_attn = GatedDeltaNet(layer.self_attn, config, index)
        for hook in (announce_packing, announce_padding):
            self.model.register_forward_pre_hook(hook, with_kwargs=True)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self: Any, module: nn.Module) -> None:
        if isinstance(module, (DecayGate, ShortConv, GatedRMSNorm)):
            module.reset_parameters()
        else:
            base._init_weights(self, module)

    name = _model_name(family)
    namespace = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{base.__name__} whose layers `config.deltanet['layers']` are Gated DeltaNet.",
        "config_class": config_class,
        "_is_stateful": True,
        "_keep_in_fp32_modules_strict": ["A_log", "dt_bias"],
        "__init__": __init__,
        "_init_weights": _init_weights,
    }
    return type(name, (base,), namespace)


CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {}
MODEL_CLASSES: dict[str, type[PreTrainedModel]] = {}


def register() -> None:
    """Make the classes of every family and register them with AutoConfig and AutoModelForCausalLM."""
    for model_type, family in FAMILIES.items():
        config_class = CONFIG_CLASSES[model_type] = _make_config_class(family)
        model_class = MODEL_CLASSES[model_type] = _make_model_class(family, config_class)
        for made in (config_class, model_class):
            globals()[made.__name__] = made  # importable by name: pickling, and the trust_remote_code shim
        AutoConfig.register(family.converted_model_type, config_class)
        AutoModelForCausalLM.register(config_class, model_class)
    # Not a family: nothing is converted, see deltanet_hf/qwen3_5.py.
    AutoConfig.register(DeltaNetQwen3_5TextConfig.model_type, DeltaNetQwen3_5TextConfig)
    AutoModelForCausalLM.register(DeltaNetQwen3_5TextConfig, DeltaNetQwen3_5ForCausalLM)


def converted_config(teacher: PreTrainedConfig, options: DeltaNetOptions) -> PreTrainedConfig:
    """The converted model's config: everything of the teacher's, and the `deltanet` entry."""
    values = teacher.to_dict()
    for key in ("model_type", "architectures", "auto_map", "transformers_version"):
        values.pop(key, None)
    family = FAMILIES[teacher.model_type]
    config_class: Any = CONFIG_CLASSES[teacher.model_type]
    return config_class(**values, architectures=[_model_name(family)], deltanet=options.to_dict())


register()
