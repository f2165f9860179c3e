"""The check of a state of several tensors."""

from __future__ import annotations

from typing import Any

import torch


def check_state(
    state: Any, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The tensors of `state`, or zeros for None.

    Raises:
        ValueError: a shape or device that does not fit.
        TypeError: a dtype other than `dtype`.
    """
    if state is None:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
    for name, tensor, shape in zip(names, state, shapes, strict=True):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"initial_state.{name}: got shape {list(tensor.shape)}, needs {list(shape)}")
        if tensor.device != device:
            raise ValueError(f"initial_state.{name}: got device {tensor.device}, needs {device} (the device of q)")
        if tensor.dtype != dtype:
            raise TypeError(f"initial_state.{name}: got dtype {tensor.dtype}, needs {dtype}")
    return tuple(state)
