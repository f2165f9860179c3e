"""Captures work on a device, to be replayed with the contents that its tensors have by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CapturedGraph(NamedTuple):
    """Captured work."""

    replay: Callable[[], object]
    output: Tensor  # which each replay overwrites
    memory: Any = None  # that further graphs may share, see `capture_cuda_graph`


Capture = Callable[..., CapturedGraph]


def capture_cuda_graph(step: Callable[[], Tensor], device: torch.device, memory: Any = None) -> CapturedGraph:
    """Capture `step` as a CUDA graph without running it.

    Everything that `step` compiles or loads on first use has to be there already.

    Args:
        memory: of another graph, which still exists; the replay of one then overwrites what the other has left.

    Raises:
        Exception: that of `step`.
    """
    graph = torch.cuda.CUDAGraph()
    broken: Exception | None = None
    try:
        # Other threads, such as NCCL's watchdog, may query events or allocate memory meanwhile, which the default mode
        # forbids.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, memory, torch.cuda.Stream(device), capture_error_mode="thread_local"),
        ):
            try:
                output = step()
            except Exception as error:
                broken = error
    finally:  # the end of a broken capture may raise an error of its own
        if broken is not None:
            raise broken
    return CapturedGraph(graph.replay, output, graph.pool())


CAPTURES: dict[str, Capture] = {"cuda": capture_cuda_graph}
"""By the type of the device; models on other devices decode without a graph."""
