"""Timing, memory and the result file that all benchmarks share."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[2] / "results/kernels"


def median_ms(run: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median time of a call in milliseconds, each between two CUDA events."""
    for _ in range(warmup):
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


def peak_gib(run: Callable[[], object]) -> float:
    """Memory a call takes at its peak beyond what was held before, in GiB."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes counted."""
    source = torch.randint(0, 255, (2**32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**32 / (median_ms(lambda: target.copy_(source), 10) * 1e-3)


def machine() -> dict[str, str]:
    """The GPU and the versions that the numbers depend on."""
    versions = {"gpu": torch.cuda.get_device_name(), "python": platform.python_version()}
    for name in ("torch", "triton", "flash-linear-attention", "flash-qla", "tilelang", "flashinfer-python"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def write(name: str, rows: list[dict[str, Any]], notes: dict[str, Any], folder: Path | None) -> Path:
    """Write a result file: machine, versions, notes, one line per row."""
    path = (folder or RESULTS) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps({"machine": machine(), **notes}, indent=1)[:-2]
    path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path
