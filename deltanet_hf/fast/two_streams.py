"""Two calls that do not depend on each other, at the same time where a CUDA graph is captured.

The kernels of one token leave most of a GPU idle, so that two kinds of heads take the time of the slower one. Without
a graph, the host launches kernels more slowly than they run, and the calls follow one another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

A = TypeVar("A")
B = TypeVar("B")


def two_streams(first: Callable[[], A], second: Callable[[], B], device: torch.device) -> tuple[A, B]:
    """The results of both, whose work on `device` may be done at the same time.

    The second is called first. The caller keeps the tensors that either call reads until this returns: memory that one
    of them gave back could be taken by the other.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        result = second()
        return first(), result
    own, other = torch.cuda.current_stream(device), _other_stream(device)
    other.wait_stream(own)
    with torch.cuda.stream(other):
        result = second()
    results = first(), result
    own.wait_stream(other)
    return results


@functools.cache
def _other_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
