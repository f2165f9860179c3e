"""Records work on a device, to be replayed with the contents that its tensors have by then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], Tensor], torch.device], tuple[Replay, Tensor]]


def record_cuda(step: Callable[[], Tensor], device: torch.device) -> tuple[Replay, Tensor]:
    """Record `step` as a CUDA graph without running it; returns what replays it, and the tensor of its results.

    Everything that `step` compiles or loads on first use has to be there already.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may query events or allocate memory meanwhile, which the default mode forbids.
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"),
    ):
        output = step()
    return graph.replay, output


RECORDERS: dict[str, Recorder] = {"cuda": record_cuda}
"""By the type of the device; models on other devices decode without a recording."""
