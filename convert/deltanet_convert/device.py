"""Devices as people know them."""

from __future__ import annotations

import torch


def description(device: torch.device) -> str:
    """The device as people know it: "cuda:0 (NVIDIA H200)", "the CPU (2 threads)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"the CPU ({thread_count()})"


def thread_count() -> str:
    """The number of threads of an operator on the CPU: "1 thread", "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads > 1)}"
