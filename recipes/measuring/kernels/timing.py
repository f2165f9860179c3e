"""Times and memory of calls on a GPU."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch

WARMUP = 3  # calls before those that are timed


def median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call in milliseconds, each between two CUDA events."""
    for _ in range(WARMUP):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in times)


def graph_us(run: Callable[[], object], calls: int = 20, repeats: int = 20) -> float:
    """Median time of a call in microseconds inside a CUDA graph of `calls` calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return 1e3 * median_ms(graph.replay, repeats) / calls


def call_without_waiting(run: Callable[[], object]) -> None:
    """Raise the error of a call that waits for the GPU, which a CUDA graph cannot capture.

    A capture that fails leaves PyTorch's allocator and random numbers unusable, so the call is made before it.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_gib(run: Callable[[], object]) -> float:
    """Memory a call takes at its peak beyond what was held before, in GiB."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted; measured once per process."""
    source = torch.randint(0, 255, (2**32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**32 / (median_ms(lambda: target.copy_(source), 10) * 1e-3)
