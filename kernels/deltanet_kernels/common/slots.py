"""Steps of sequences whose tensors are rows of larger ones, such as pages of a server's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

Results = TypeVar("Results")


def on_copies(step: Callable[[Any], Results], call: Any, names: tuple[str, ...]) -> Results:
    """`step` of a call with `slots`, on copies of the rows of its tensors `names`, which are then put back."""
    slots = call.slots.long()
    copies = {name: x[slots] for name in names if (x := getattr(call, name)) is not None}
    results = step(call._replace(slots=None, **copies))
    for name, x in copies.items():
        getattr(call, name)[slots] = x
    return results


def row_size(x: Tensor | None) -> int:
    """Elements from a row to the next; 0 without a tensor."""
    return 0 if x is None else x.stride(0)
