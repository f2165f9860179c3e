"""A model's own modules by few kernels, in calls without gradients on a GPU.

A family computes its norms and the product of its feed-forward block operation by operation. A small model waits for
the launches of these operations, and a large one for its memory: at 8B they are a fifth of the time that a prompt
takes. Results are rounded as before; what is saved, trained and compiled knows nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deltanet_hf.decoding.fused_mlps import CLASSES, fused_mlps
from deltanet_hf.decoding.fused_norms import FORMS, fused_norms
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

    Nor does it in a model of which a module is compiled or has a replaced forward, as in a call within this one.
    `with_sums`: see `fused_norms`; compiled code would not notice that a sum has been put off.
    """
    found = None if torch.is_grad_enabled() else _norms_and_mlps(model)
    if found is None:
        yield
        return
    norms, mlps = found
    with fused_norms(norms, with_sums), fused_mlps(mlps):
        yield


def _norms_and_mlps(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]] | None:
    """The modules with the names of known classes; None if a module is replaced.

    It looks at every module in every call, and is therefore quicker than `model.modules()`.
    """
    modules: list[Any] = [model]
    norms, mlps, seen = [], [], set()
    for module in modules:
        if module is None or module in seen:
            continue
        seen.add(module)
        if is_replaced(module):
            return None
        name = type(module).__name__
        if name in FORMS:
            norms.append(module)
        elif name in CLASSES:
            mlps.append(module)
        children = module._modules
        if children:
            modules += children.values()
    return norms, mlps
