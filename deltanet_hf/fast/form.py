"""Which form a model takes in calls without gradients, and the reasons for the plain one.

`eval()`, `to()`, `generate` and `serve` ask for it. A forward takes their answer, as long as nothing about the model
has changed since, and never moves weights. The reasons are what has been put around the model's modules, which the
fast form passes by.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from deltanet_hf.fast.decoder import FastDecoder
from deltanet_hf.fast.families import LAYER, NORM, family_of

MOVES_ON = {"cuda"}  # types of devices that launch kernels slower than they compute them
OUR_HOOKS = (  # which do nothing to the results
    "deltanet_hf.mixers.layer.masks",
    "deltanet_hf.models.stateful",
    "transformers.utils.output_capturing",
)
OWN = os.path.dirname(os.path.dirname(__file__))
LIBRARIES = tuple(os.path.join(folder, "") for folder in (torch.__path__[0], transformers.__path__[0], OWN))


class Version:
    """The state on which a model's form depends: modules, their attributes, classes and hooks, and where weights are.

    Attributes of the model itself and of modules without weights do not count: `generate` and rotary embeddings keep
    things of their own there.
    """

    def __init__(self, model: nn.Module) -> None:
        views: list[Any] = []  # which show later changes
        for module in model.modules():
            dicts: list[Any] = [module._modules, module._parameters]
            dicts += [module._forward_hooks, module._forward_pre_hooks]
            if module is not model and (module._modules or module._parameters):
                dicts.append(vars(module))
                views += [value for value in vars(module).values() if type(value) is list]  # as of merged adapters
            views += [values.values() for values in dicts]
        kinds = {kind for module in model.modules() for kind in library_classes(module)}
        views += [vars(kind).values() for kind in kinds]
        self._views = views
        self._values = list(itertools.chain.from_iterable(views))
        self._weights = [weight for weight in model.parameters() if type(weight) is nn.Parameter]
        self._addresses = [weight.data_ptr() for weight in self._weights]

    def is_current(self) -> bool:
        """Whether nothing has changed since; half a millisecond for 30 layers."""
        return (
            sum(map(len, self._views)) == len(self._values)
            and all(map(is_, itertools.chain.from_iterable(self._views), self._values))
            and [weight.data_ptr() for weight in self._weights] == self._addresses
        )


class Decision(NamedTuple):
    """The form of a model, or the reason for its plain form, as long as the version is current."""

    form: FastDecoder | str
    version: Version
    moved: bool


_DECISIONS: WeakKeyDictionary[nn.Module, Decision] = WeakKeyDictionary()
_HELD: ContextVar[tuple[nn.Module, FastDecoder | str] | None] = ContextVar("deltanet_held_form", default=None)


def fast_form(model: nn.Module) -> FastDecoder | str:
    """The fast form of a causal language model of a supported family, converted or not, or why it has none.

    Its results are those of the plain form but for rounding. Making it brings the weights of each layer's projections
    together in memory, where that serves and nobody else can hold their addresses; names, values and files stay.
    """
    held = _held(model)
    return decided_form(model, _may_move(model)) if held is None else held


def _held(model: nn.Module) -> FastDecoder | str | None:
    """The form that `held_form` holds for this model; None outside of it."""
    held = _HELD.get()
    return held[1] if held is not None and held[0] is model else None


def decided_form(model: nn.Module, may_move: bool) -> FastDecoder | str:
    """The form of a model, decided anew where the model has changed or where weights may now be moved."""
    found = _DECISIONS.get(model)
    if found is None or not found.version.is_current() or (may_move and not found.moved):
        reason = next(reasons(model), None)
        form = FastDecoder(model, may_move) if reason is None else reason
        found = _DECISIONS[model] = Decision(form, Version(model), may_move)
    return found.form


@contextmanager
def held_form(model: nn.Module) -> Iterator[FastDecoder | str]:
    """`fast_form(model)`, which the calls in here take without looking for changes of the model."""
    form = fast_form(model)
    before = _HELD.set((model, form))
    try:
        yield form
    finally:
        _HELD.reset(before)


def with_fast_form(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model class that takes the fast form where there is one, without gradients or a compiler."""

    @functools.wraps(forward)  # transformers reads its signature
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        held = _held(self)
        form = decided_form(self, may_move=False) if held is None else held
        if isinstance(form, FastDecoder) and reason_of_call(self, kwargs) is None:
            return form(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    wrapped.plain_form = forward  # type: ignore[attr-defined]
    return wrapped


def _may_move(model: Any) -> bool:
    """Whether no CUDA graph of training can hold the addresses of weights, also of those that have no gradient.

    Nor may the move itself become part of a graph.
    """
    if model.device.type not in MOVES_ON or model.training:
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    weights = list(model.parameters())
    return all(one.grad is None for one in weights) and len({one.requires_grad for one in weights}) < 2


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
    kinds = (
        (kind, isinstance(module, PreTrainedModel)) for module in model.modules() for kind in library_classes(module)
    )
    for kind, of_model in dict.fromkeys(kinds):
        yield from (f"{kind.__name__}.{name} is replaced" for name in _replaced(kind, of_model))
    if any(type(weight) is not nn.Parameter for weight in weights):
        yield "weights are sharded, or of another class than nn.Parameter"


def _in_decoder(decoder: Any) -> Iterator[str]:
    if not hasattr(decoder, "layers"):
        yield f"{type(decoder).__name__} has no decoder layers"
        return
    norms = [decoder.norm]
    for layer in decoder.layers:
        family = family_of(type(layer), LAYER)
        if family is None:
            yield f"{type(layer).__name__} is no decoder layer of a supported family"
        else:
            norms += [getattr(layer, name) for name in family.norms if name is not None]
    yield from (f"{type(norm).__name__} is no known norm" for norm in norms if family_of(type(norm), NORM) is None)


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
    replaced = (name for name in held if isinstance(getattr(type(module), name, None), FunctionType))
    yield from (f"its method {name} is replaced" for name in replaced)


def library_classes(module: nn.Module) -> Iterator[type]:
    """The classes of torch and transformers that a module is of, whose methods others may replace for all modules."""
    return (kind for kind in type(module).__mro__ if kind.__module__.startswith(("torch.", "transformers.")))


def _replaced(kind: type, of_model: bool) -> Iterator[str]:
    """The methods of a library's class that come from elsewhere; of a model's, some of which do, `forward` alone."""
    for name, method in vars(kind).items():
        counts = name == "forward" or (not of_model and isinstance(method, FunctionType))
        if counts and _comes_from_outside(method):
            yield name


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
