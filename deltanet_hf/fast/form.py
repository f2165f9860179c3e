"""Which form a model takes in calls without gradients.

`eval()`, `to()`, `generate` and `serve` ask for it. A forward takes their answer, as long as nothing about the model
has changed since, and never moves weights.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deltanet_hf.fast.decoder import FastDecoder
from deltanet_hf.fast.reasons import library_classes, reason_of_call, reasons

MOVES_ON = {"cuda"}  # types of devices that launch kernels slower than they compute them


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
