"""Fixtures that the tests of the kernels share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltanet_kernels.gated_delta_rule import chips
from deltanet_kernels.gated_delta_rule.launch_plan import LaunchPlan


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN, or of integers with 77, so that elements that no kernel writes are noticed.

    Empty tensors stay untouched: a compiler that traces an operator's gradient refuses to fill memory in it.
    """

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def function(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = make(*args, **kwargs)
            return x.fill_(torch.nan if x.is_floating_point() else 77) if x.numel() else x

        return function

    # A device context keeps the constructors that it finds at its first use, for good; it must not keep these.
    with torch.device("cpu"):
        torch.empty(0)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel of all gradients, of bfloat16 heads that share nothing and are small, also in float32; the stages."""
    launched: list[str] = []

    def serving(plan: LaunchPlan, stage: str, *copied: torch.Tensor) -> chips.Kernel:
        launched.append(stage)
        return chips.GRADIENTS_64 if stage == chips.GRADIENTS else plan.kernels[0]

    monkeypatch.setattr(LaunchPlan, "serving", serving)
    return launched
