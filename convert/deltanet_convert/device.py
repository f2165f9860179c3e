"""Moves the arguments of layers to the device on which they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def moved(arguments: Any, device: torch.device) -> Any:
    """Keyword arguments of a layer, with all tensors in them on `device`."""
    if isinstance(arguments, Tensor):
        return arguments.to(device)
    if isinstance(arguments, dict):
        return {name: moved(value, device) for name, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(moved(value, device) for value in arguments)
    return arguments
