"""Registration of operators with PyTorch, for torch.compile, autograd and CUDA graphs.

`torch.library.custom_op` checks every call's outputs for aliases, which costs half a millisecond per call (measured,
torch 2.11); the operators here never alias, so they are defined directly. Where nothing observes a call (no compiler,
no gradients, no modes, plain tensors), it skips PyTorch's dispatcher and calls the function itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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


def operator(fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[P, R]], Registered[P, R]]:
    """Register a function of calls, which are named tuples, as torch.ops.deltanet.<its name>.

    The fields of its calls, and of calls within them, are the arguments of the registered operator, one after the
    other; `mutates` names those that it changes. `fake` takes the same calls and returns results of the same shapes.
    """

    def register(function: Callable[P, R]) -> Registered[P, R]:
        name = function.__name__
        hints = get_type_hints(function)
        result, calls = hints.pop("return"), tuple(hints.values())
        prototype = _flat(function, calls, result)
        schema = torch.library.infer_schema(prototype, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, prototype, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deltanet::{name}", _flat(fake, calls, result), lib=_LIBRARY)
        return Registered(function, getattr(torch.ops.deltanet, name).default, calls)

    return register


def _is_call(hint: Any) -> bool:
    return hasattr(hint, "_fields")


def _parameters(call: Any) -> Iterator[inspect.Parameter]:
    for name, hint in get_type_hints(call).items():
        if _is_call(hint):
            yield from _parameters(hint)
        else:
            kind = str if get_origin(hint) is Literal else hint
            yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)


def _maker(call: Any) -> Callable[[Iterator[Any]], Any]:
    """A function that makes such a call of the next of its fields."""
    makers = [_maker(hint) if _is_call(hint) else next for hint in get_type_hints(call).values()]
    return lambda fields: call(*(make(fields) for make in makers))


def _flat(function: Callable[..., Any], calls: tuple[Any, ...], result: Any) -> Callable[..., Any]:
    """The function with the fields of its calls as parameters."""
    makers = [_maker(call) for call in calls]

    def flat(*inputs: Any) -> Any:
        fields = iter(inputs)
        return function(*(make(fields) for make in makers))

    parameters = [parameter for call in calls for parameter in _parameters(call)]
    flat.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return flat


def _fields(call: Any) -> tuple[Any, ...]:
    return tuple(y for x in call for y in (_fields(x) if isinstance(x, tuple) else (x,)))


def is_observed() -> bool:
    """Whether operations are compiled, traced, transformed by functorch, or seen by a mode (fake tensors, counters)."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


class Registered(Generic[P, R]):
    """A registered operator: `op` where PyTorch traces or differentiates, `function` for plain eager calls.

    `function` takes named tuples of the classes `calls`, and `op` their fields. `function` may return None where `op`
    returns an empty tensor, which takes as long to make as a full one.
    """

    def __init__(self, function: Callable[P, R], op: Callable[..., R], calls: tuple[Any, ...]) -> None:
        self.function, self.op, self.calls = function, op, calls
        self._nested = any(_is_call(hint) for call in calls for hint in get_type_hints(call).values())

    def __call__(self, *calls: P.args, **none: P.kwargs) -> R:
        flat = self.flat(*calls)
        if is_observed() or torch.is_grad_enabled() or not _are_plain(flat):
            return self.op(*flat)
        return self.function(*calls, **none)

    def flat(self, *calls: Any) -> tuple[Any, ...]:
        """The arguments of `op`."""
        if self._nested:
            return _fields(calls)
        return calls[0] if len(calls) == 1 else tuple(chain.from_iterable(calls))


def _are_plain(inputs: tuple[Any, ...]) -> bool:
    """Whether all tensors, which are on one device, are of PyTorch's own classes and not on the meta device."""
    return _PLAIN.issuperset(map(type, inputs)) and not getattr(inputs[0], "is_meta", False)


def differentiable_call(
    forward: Registered[P, R],
    backward: Callable[..., tuple[Tensor, ...]],
    differentiated: Sequence[str],
    upstream: Any,
    kept: Any = None,
    without: Sequence[str] = (),
) -> Callable[P, R]:
    """`forward`, an operator of one call, with the gradients that `backward(upstream, call, kept)` computes.

    The gradient that is registered with the operator does the same as the function for eager calls, but costs 0.2 ms
    more a call on the host.

    Args:
        forward: its last results are the fields of `kept`.
        backward: returns the gradients of the fields `differentiated` of the call, in their order, anything where a
            field is None. Without `kept` it takes the other two.
        upstream: named tuple of the gradients of the first results; None where a result is not used or empty, but
            zeros for the first one.
        kept: named tuple of what `forward` computes and `backward` reads.
        without: fields of the call that `backward` does not read; it gets empty tensors in their place.
    """
    (call_of,) = forward.calls
    outputs, held = len(upstream._fields), 0 if kept is None else len(kept._fields)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        read = [
            x.new_empty(0) if name in without and x is not None else x
            for name, x in zip(call_of._fields, tensors, strict=True)
        ]
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.first = results[0].shape, results[0].dtype
        ctx.save_for_backward(*read, *results[len(results) - held :])
        ctx.set_materialize_grads(False)

    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        call = call_of(*(y if x is None else x for x, y in zip(saved, ctx.rest, strict=False)))
        first, *others = (None if x is None or 0 in x.shape else x for x in grads[:outputs])
        if first is None:
            shape, dtype = ctx.first
            first = saved[0].new_zeros(shape, dtype=dtype)
        rest = () if kept is None else (kept(*saved[len(call) :]),)
        found = dict(zip(differentiated, backward(upstream(first, *others), call, *rest), strict=True))
        return tuple(None if x is None else found.get(name) for name, x in zip(call_of._fields, call, strict=True))

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(call_of(*inputs))  # type: ignore[call-arg]
            setup_context(ctx, inputs, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:
            return run(ctx, *grads)

    name = forward.op.name().partition("::")[2].partition(".")[0]  # type: ignore[attr-defined]
    torch.library.register_autograd(f"deltanet::{name}", run, setup_context=setup_context, lib=_LIBRARY)

    def compute(*calls: P.args, **none: P.kwargs) -> R:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            inputs = forward.flat(*calls)
            if any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
                found: R = Differentiable.apply(*inputs)
                return found
        return forward(*calls, **none)

    return compute
