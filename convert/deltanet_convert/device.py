"""The option `--device` of the commands that run a teacher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_hf.errors import UserError


def chosen_device(option: str | None) -> torch.device:
    """The device of `--device`; without it, a GPU if there is one. UserError if there is no such device."""
    if option is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(option)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: '{option}' cannot be used here; give cpu, cuda or cuda:1") from error
    return device


def description(device: torch.device) -> str:
    """The device as people know it: "cuda:0 (NVIDIA H200)", "the CPU (2 threads)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"the CPU ({torch.get_num_threads()} threads)"


def moved(arguments: Any, device: torch.device) -> Any:
    """Keyword arguments of a layer, with all tensors in them on `device`."""
    if isinstance(arguments, Tensor):
        return arguments.to(device)
    if isinstance(arguments, dict):
        return {name: moved(value, device) for name, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(moved(value, device) for value in arguments)
    return arguments
