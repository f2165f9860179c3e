"""A stand-in for a full disk: the system refuses files above a size (EFBIG), whatever library writes them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def limit_during(patch: pytest.MonkeyPatch, owner: Any, name: str, size: int, calls_before: int = 0) -> None:
    """Apply the limit while the function `owner.name` runs, from its call number `calls_before` on."""
    real: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def limited(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] <= calls_before:
            return real(*args, **kwargs)
        with largest_file(size):
            return real(*args, **kwargs)

    patch.setattr(owner, name, limited)
