"""Registration of operators with PyTorch, for torch.compile, autograd and CUDA graphs.

`torch.library.custom_op` checks every call's outputs for aliases, which costs half a millisecond per call (measured,
torch 2.11); the operators here never alias, so they are defined directly. Where nothing observes a call (no compiler,
no gradients, no modes, plain tensors), it skips PyTorch's dispatcher and calls the function itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

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


def operator(fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Register a function as torch.ops.deltanet.<its name>, with `fake` giving the shapes of its results."""

    def register(function: Callable[..., Any]) -> Operator:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deltanet::{name}", fake, lib=_LIBRARY)
        return Operator(function, getattr(torch.ops.deltanet, name).default)

    return register


class Operator:
    """A registered operator: `op` where PyTorch traces or differentiates, `function` for plain eager calls.

    `function` may return None where `op` returns an empty tensor, which takes as long to make as a full one.
    """

    def __init__(self, function: Callable[..., Any], op: Callable[..., Any]) -> None:
        self.function, self.op = function, op

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain_call(inputs):
            return self.op(*inputs)
        return self.function(*inputs)


def _is_plain_call(inputs: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would do nothing but call the function."""
    if (
        torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    # The tensors of a call are on one device.
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
