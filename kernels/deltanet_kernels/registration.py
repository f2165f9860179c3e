"""Registration of operators with PyTorch, for torch.compile, autograd and CUDA graphs.

`torch.library.custom_op` checks every call's outputs for aliases, which costs half a millisecond a call (measured,
torch 2.11); the operators here never alias, so they are defined directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("deltanet", "DEF")


def operator(
    fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as torch.ops.deltanet.<its name>, with `fake` giving the shapes of its results."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"deltanet::{name}", fake, lib=_LIBRARY)
        op: Callable[..., Any] = getattr(torch.ops.deltanet, name).default
        return op

    return register


def gradient(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Register the gradient formula of deltanet::<name>."""
    torch.library.register_autograd(f"deltanet::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
