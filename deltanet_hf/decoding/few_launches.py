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

from deltanet_hf.decoding.fused_mlps import fused_mlps
from deltanet_hf.decoding.fused_norms import fused_norms
from deltanet_hf.decoding.obstacles import is_replaced


def with_few_launches(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model class by few kernels on CUDA, where there are no gradients and no compiler."""

    @functools.wraps(forward)  # transformers reads its signature
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.device.type != "cuda":
            return forward(self, *args, **kwargs)
        with few_launches(self):
            return forward(self, *args, **kwargs)

    return wrapped


@contextmanager
def few_launches(model: nn.Module, with_sums: bool = False) -> Iterator[None]:
    """Calls of `model` in this thread take few kernels. With gradients nothing changes.

    Nor does it in a model of which a module is compiled or has a replaced forward, as in a call within this one.
    `with_sums`: see `fused_norms`; compiled code would not notice that a sum has been put off.
    """
    if torch.is_grad_enabled():
        yield
        return
    modules = list(model.modules())
    if any(is_replaced(module) for module in modules):
        yield
        return
    with fused_norms(modules, with_sums), fused_mlps(modules):
        yield
