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
        given = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.no_grad()
def float64_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of a model whose weights are converted to float64, in place."""
    with Float64():
        return model.double()(ids).logits
