"""The reasons for the plain form of a model: what has been put around its modules, which the fast form passes by."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn

from deltanet_hf.fast.decoder import norms_of
from deltanet_hf.fast.parts import form_of

OUR_HOOKS = (  # which do nothing to the results
    "deltanet_hf.mixers.layer.masks",
    "deltanet_hf.models.stateful",
    "transformers.utils.output_capturing",
)
OWN = os.path.dirname(os.path.dirname(__file__))
LIBRARIES = tuple(os.path.join(folder, "") for folder in (torch.__path__[0], transformers.__path__[0], OWN))


def reasons(model: Any) -> Iterator[str]:
    """Why a model has no fast form, in words that follow a colon; nothing if it has one."""
    yield from _in_decoder(getattr(model, "model", model))
    if getattr(model, "hf_quantizer", None) is not None:
        yield "the weights are quantised"
    weights = list(model.parameters())
    if any(weight.is_meta or not weight.numel() for weight in weights):
        yield "weights are on the meta device, or empty"
    if len({weight.device for weight in weights}) > 1:
        yield "the weights are on several devices"
    for name, module in model.named_modules():
        yield from (f"{name or 'the model'}: {reason}" for reason in _in_module(module))
    if any(type(weight) is not nn.Parameter for weight in weights):
        yield "weights are sharded, or of another class than nn.Parameter"


def _in_decoder(decoder: Any) -> Iterator[str]:
    if not hasattr(decoder, "layers"):
        yield f"{type(decoder).__name__} has no decoder layers"
        return
    norms = [decoder.norm]
    for layer in decoder.layers:
        names = norms_of(layer)
        if names is None:
            yield f"{type(layer).__name__} is no decoder layer of a supported family"
        norms += [getattr(layer, name) for name in names or () if name is not None]
    yield from (f"{type(norm).__name__} is no known norm" for norm in norms if form_of(norm) is None)


def _in_module(module: nn.Module) -> Iterator[str]:
    if module.training:
        yield "it is in training mode"
    held = module.__dict__
    if "forward" in held or held.get("_compiled_call_impl") is not None:
        yield "its forward is compiled or replaced"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(getattr(hook, "__module__", None) not in OUR_HOOKS for hook in hooks):
        yield "it has forward hooks"
    from_peft = type(module).__module__.startswith("peft.") and hasattr(module, "active_adapters")
    if from_peft and not getattr(module, "merged", False):
        yield "its adapter is not merged"
    for kind in library_classes(module):
        if _comes_from_outside(vars(kind).get("forward")):
            yield f"{kind.__name__}.forward is replaced"
    replaced = (name for name in held if isinstance(getattr(type(module), name, None), FunctionType))
    yield from (f"its method {name} is replaced" for name in replaced)


def library_classes(module: nn.Module) -> Iterator[type]:
    """The classes of torch and transformers that a module is of, whose methods others may replace for all modules."""
    return (kind for kind in type(module).__mro__ if kind.__module__.startswith(("torch.", "transformers.")))


def _comes_from_outside(method: Any) -> bool:
    """Whether a method, or what is wrapped around it, was written elsewhere than in torch, transformers and here."""
    while method is not None:
        code = getattr(method, "__code__", None)
        if code is None or not code.co_filename.startswith(LIBRARIES):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def reason_of_call(model: Any, inputs: dict[str, Any]) -> str | None:
    """Why a call of a model that has a fast form takes the plain form; None if it does not."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return "there are global forward hooks"
    for name in ("attentions", "hidden_states", "router_logits"):
        if inputs.get(f"output_{name}") or getattr(model.config, f"output_{name}", False):
            return "attentions, hidden states or router logits are returned"
    return None
