"""Runs models entirely in float64, so that two ways to compute one function can be compared without their rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Inside the context, conversions to float32 give float64.

    Models convert intermediate results to float32 (norms, gates, the delta rule) whatever the dtype of their weights.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch.Tensor.view:  # reads the bits of a tensor as another dtype
            return func(*args, **(kwargs or {}))
        given = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.no_grad()
def float64_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of a model whose weights are converted to float64, in place."""
    with Float64():
        return double(model)(ids).logits


def double(model: Any) -> Any:
    """The model with its weights in float64; experts are computed one by one, for grouped products have no float64."""
    model.config._experts_implementation = "eager"
    return model.double()


@torch.no_grad()
def assert_same_function(model: Any, theirs: Any, ids: torch.Tensor) -> None:
    """Asserts that a model and its export, both with float32 weights, compute the same logits up to rounding.

    In float64, the largest difference may be 1e-7: 3e-8 was found where norm weights are rounded (w - 1 with w < 1/2),
    otherwise 2e-13. In float32, the relative RMS error of the export may be 2e-5: .7e-6 to 5e-6 was found, and .6e-6
    to 3e-6 for our own model. Afterwards, the weights of both are float64.
    """
    got = theirs(ids).logits
    wanted = float64_logits(model, ids)
    assert (float64_logits(theirs, ids) - wanted).abs().max() <= 1e-7
    assert (got - wanted).norm() / wanted.norm() <= 2e-5
