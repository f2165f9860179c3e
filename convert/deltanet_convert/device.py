"""Moves the arguments of layers to the device on which they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def description(device: torch.device) -> str:
    """The device as people know it: "cuda:0 (NVIDIA H200)", "the CPU (2 threads)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"the CPU ({thread_count()})"


def thread_count() -> str:
    """The number of threads of an operator on the CPU: "1 thread", "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads > 1)}"


def moved(arguments: Any, device: torch.device) -> Any:
    """Keyword arguments of a layer, with all tensors in them on `device`."""
    if isinstance(arguments, Tensor):
        return arguments.to(device)
    if isinstance(arguments, dict):
        return {name: moved(value, device) for name, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(moved(value, device) for value in arguments)
    return arguments
