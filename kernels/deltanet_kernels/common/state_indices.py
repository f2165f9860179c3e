"""Steps of sequences whose tensors are rows of larger ones, such as pages of a server's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Results = TypeVar("Results")


def on_copies(step: Callable[[Any], Results], call: Any, names: tuple[str, ...]) -> Results:
    """`step` of a call with `state_indices`, on copies of the rows of its tensors `names`, which are then put back."""
    state_indices = call.state_indices.long()
    copies = {name: x[state_indices] for name in names if (x := getattr(call, name)) is not None}
    results = step(call._replace(state_indices=None, **copies))
    for name, x in copies.items():
        getattr(call, name)[state_indices] = x
    return results


def row_size(x: Tensor | None) -> int:
    """Elements from a row to the next; 0 without a tensor."""
    return 0 if x is None else x.stride(0)
