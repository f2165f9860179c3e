"""A model's own modules by few kernels, in calls without gradients on a GPU.

A family computes its norms and the product of its feed-forward block operation by operation. A small model waits for
the launches of these operations, and a large one for its memory. Here each module that is known gets a forward of its
own for the length of a call. Results are rounded as before; what is saved, trained and compiled knows nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from deltanet_hf.decoding.deferred_sum import DeferredSum
from deltanet_hf.decoding.fused_mlps import CLASSES, mlp_forward
from deltanet_hf.decoding.fused_norms import FORMS, norm_forward
from deltanet_hf.decoding.obstacles import is_replaced
from deltanet_hf.decoding.projections import join_for_inference, leave_in_place


def with_few_launches(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model class by few kernels on CUDA, where there are no gradients and no compiler."""

    @functools.wraps(forward)  # transformers reads its signature
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        if torch.is_grad_enabled():
            leave_in_place(self)
            return forward(self, *args, **kwargs)
        if self.device.type != "cuda":
            return forward(self, *args, **kwargs)
        join_for_inference(self)
        with few_launches(self):
            return forward(self, *args, **kwargs)

    return wrapped


@contextmanager
def few_launches(model: nn.Module, with_sums: bool = False) -> Iterator[None]:
    """Calls of `model` in this thread take few kernels. With gradients nothing changes.

    Nor does it in a model of which a module is compiled or has a replaced forward, as in a call within this one:
    compiled code would not notice that a sum has been put off.

    Args:
        with_sums: compute residual sums together with the norms behind them. It costs the host some time per PyTorch
            function, which a recorded step spends once.
    """
    modules = None if torch.is_grad_enabled() else _own_modules(model)
    if modules is None:
        yield
        return
    with DeferredSum() if with_sums else nullcontext() as sums:
        found = ((module, norm_forward(module, sums) or mlp_forward(module)) for module in modules)
        forwards = {module: forward for module, forward in found if forward is not None}
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module in forwards:
                module.__dict__.pop("forward", None)


def _own_modules(model: nn.Module) -> set[nn.Module] | None:
    """The modules of a model that may get a forward of their own; None if any module is replaced.

    It costs the host less time per call than `model.modules()`, and looks at the name of each class once.
    """
    known: dict[type, bool] = {}
    seen: set[nn.Module | None] = {None}
    found: set[nn.Module] = set()
    waiting: list[Any] = [model]
    for module in waiting:
        if module in seen:
            continue
        seen.add(module)
        if is_replaced(module):
            return None
        kind = type(module)
        if kind not in known:
            known[kind] = kind.__name__ in FORMS or kind.__name__ in CLASSES
        if known[kind]:
            found.add(module)
        if module._modules:
            waiting += module._modules.values()
    return found
