"""Records work on a device, to be replayed with the contents that its tensors have by then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Recording(NamedTuple):
    """Recorded work."""

    replay: Callable[[], object]
    output: Tensor  # which each replay overwrites
    memory: Any = None  # that further recordings may share, see `record_cuda`


Recorder = Callable[..., Recording]


def record_cuda(step: Callable[[], Tensor], device: torch.device, memory: Any = None) -> Recording:
    """Record `step` as a CUDA graph without running it.

    Everything that `step` compiles or loads on first use has to be there already.

    Args:
        memory: of another recording, which still exists; the replay of one then overwrites what the other has left.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may query events or allocate memory meanwhile, which the default mode forbids.
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, memory, torch.cuda.Stream(device), capture_error_mode="thread_local"),
    ):
        output = step()
    return Recording(graph.replay, output, graph.pool())


RECORDERS: dict[str, Recorder] = {"cuda": record_cuda}
"""By the type of the device; models on other devices decode without a recording."""
