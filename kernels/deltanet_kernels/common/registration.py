"""Registration of operators with PyTorch, for torch.compile, autograd and CUDA graphs.

`torch.library.custom_op` checks every call's outputs for aliases, which costs half a millisecond per call (measured,
torch 2.11); the operators here never alias, so they are defined directly. Where nothing observes a call (no compiler,
no gradients, no modes, plain tensors), it skips PyTorch's dispatcher and calls the function itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch

_LIBRARY = torch.library.Library("deltanet", "DEF")
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None), int, float, bool, str}
P = ParamSpec("P")
R = TypeVar("R")


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """functools.cache, except under torch.compile, which would warn about the cache: there the function is called.

    Sizes that are symbolic while shapes are inferred have no hash; they are taken as the numbers that they stand for.
    """
    known: Any = functools.cache(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        try:
            result: R = known(*args, **kwargs)
        except TypeError:
            if torch.SymInt not in map(type, args):
                raise
            result = known(*(int(x) if isinstance(x, torch.SymInt) else x for x in args), **kwargs)
        return result

    call.cache_clear = known.cache_clear  # type: ignore[attr-defined]
    return call


def operator(fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Registered]:
    """Register a function as torch.ops.deltanet.<its name>, with `fake` giving the shapes of its results.

    If the parameters are named tuples, their fields are the arguments of the registered operator, one after the other.
    """

    def register(function: Callable[..., Any]) -> Registered:
        name, calls = function.__name__, _named_tuples(function)
        prototype = _flat(function, calls) if calls else function
        schema = torch.library.infer_schema(prototype, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, prototype, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deltanet::{name}", _flat(fake, calls) if calls else fake, lib=_LIBRARY)
        return Registered(function, getattr(torch.ops.deltanet, name).default, calls)

    return register


def _named_tuples(function: Callable[..., Any]) -> tuple[Any, ...]:
    hints = get_type_hints(function)
    hints.pop("return", None)
    return tuple(hints.values()) if all(hasattr(hint, "_fields") for hint in hints.values()) else ()


def _flat(function: Callable[..., Any], calls: tuple[Any, ...]) -> Callable[..., Any]:
    """The function with the fields of its named tuples as parameters."""

    def flat(*inputs: Any) -> Any:  # PyTorch leaves out last ones that are the defaults
        given = iter(inputs)
        return function(*(call(*islice(given, len(call._fields))) for call in calls))

    kind, defaults = inspect.Parameter.POSITIONAL_OR_KEYWORD, calls[-1]._field_defaults
    parameters = [
        inspect.Parameter(name, kind, annotation=hint, default=defaults.get(name, inspect.Parameter.empty))
        for call in calls
        for name, hint in get_type_hints(call).items()
    ]
    result = get_type_hints(function).get("return")
    flat.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return flat


def is_observed() -> bool:
    """Whether operations are compiled, traced, transformed by functorch, or seen by a mode (fake tensors, counters)."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


class Registered:
    """A registered operator: `op` where PyTorch traces or differentiates, `function` for plain eager calls.

    `function` may return None where `op` returns an empty tensor, which takes as long to make as a full one. With
    `calls` it takes these named tuples, and `op` their fields.
    """

    def __init__(self, function: Callable[..., Any], op: Callable[..., Any], calls: tuple[Any, ...] = ()) -> None:
        self.function, self.op, self.calls = function, op, calls

    def __call__(self, *inputs: Any) -> Any:
        flat = inputs
        if self.calls:
            flat = inputs[0] if len(inputs) == 1 else tuple(chain.from_iterable(inputs))
        if is_observed() or torch.is_grad_enabled() or not _are_plain(flat):
            return self.op(*flat)
        return self.function(*inputs)


def _are_plain(inputs: tuple[Any, ...]) -> bool:
    """Whether all tensors, which are on one device, are of PyTorch's own classes and not on the meta device."""
    return _PLAIN.issuperset(map(type, inputs)) and not getattr(inputs[0], "is_meta", False)


def differentiable(op: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., Any]) -> Any:
    """The operator for eager calls that need gradients, as a torch.autograd.Function.

    The gradient that is registered with the operator does the same, but costs 0.2 ms more a call on the host.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = op(*inputs)
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    def call(*inputs: Any) -> Any:
        needed = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        return Differentiable.apply(*inputs) if needed and not torch.compiler.is_compiling() else op(*inputs)

    return call


def gradient(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Register the gradient formula of deltanet::<name>."""
    torch.library.register_autograd(f"deltanet::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def differentiable_call(
    forward: Registered, backward: Callable[..., Any], upstream: Any, kept: Any, without: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """`forward`, an operator of one call, with the gradients that `backward(upstream, call, kept)` computes.

    Args:
        forward: returns the outputs, as many as `upstream` has fields, and then the fields of `kept`.
        backward: returns the gradients of the call's fields that have one, by name.
        upstream, kept: named tuples of the outputs' gradients and of what `forward` keeps.
        without: fields of the call that `backward` does not read; it gets empty tensors in their place.
    """
    (call_of,) = forward.calls
    outputs, unread = len(upstream._fields), [call_of._fields.index(name) for name in without]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        tensors = [x if isinstance(x, torch.Tensor) else None for x in inputs]
        for i in unread:
            tensors[i] = None if tensors[i] is None else tensors[i].new_empty(0)
        ctx.rest = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.save_for_backward(*tensors, *output[outputs:])
        ctx.set_materialize_grads(False)

    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        call = call_of(*(y if x is None else x for x, y in zip(saved, ctx.rest, strict=False)))
        found = backward(upstream(*grads[:outputs]), call, kept(*saved[len(call) :]))
        return tuple(found.get(name) for name in call_of._fields)

    gradient(forward.op.name().partition("::")[2].partition(".")[0], run, setup_context)  # type: ignore[attr-defined]
    compute = differentiable(lambda *inputs: forward(call_of(*inputs)), run, setup_context)
    return lambda call: compute(*call)
