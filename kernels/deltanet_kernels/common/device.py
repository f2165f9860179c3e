"""A CUDA device: facts that choose a configuration, products without autocast, and calls at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deltanet_kernels.common.registration import cached


@cached
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere (the interpreter)."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cached
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) elsewhere (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def no_autocast(device: torch.device) -> torch.autocast:
    """Turn autocast off, which would turn the float32 products into bfloat16 ones."""
    return torch.autocast(device.type, enabled=False)


def two_streams(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """The results of calls that do not depend on each other; where a graph is captured, all others beside the first.

    The kernels of one token leave most of a GPU idle, so that two kinds of heads take the time of the slower one.
    Without a graph, the host launches kernels more slowly than they run, and the calls follow one another.

    The first is called last. The caller keeps the tensors that the calls read until this returns: memory that one of
    them gave back could be taken by another.
    """
    first, *others = calls
    if not others or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        results = [call() for call in others]
        return [first(), *results]
    own, other = torch.cuda.current_stream(device), _other_stream(device)
    other.wait_stream(own)
    with torch.cuda.stream(other):
        results = [call() for call in others]
    results = [first(), *results]
    own.wait_stream(other)
    return results


@functools.cache
def _other_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
