"""Sizes that the kernels of step.py are launched with."""

from __future__ import annotations

import torch

from deltanet_kernels.common.sizes import power_of_two


def step_slices(K: int, V: int, programs: int, processors: int) -> tuple[int, int, bool]:
    """Columns per slice of the one-token step, warps per program, and whether the next slice is loaded early.

    Slices have rows of 256 bytes of float32; narrower ones cost bandwidth. There is one thread per channel of q and k:
    with more threads the sums over K, which cross the warps, take longer than the loads. Loading early takes the
    registers of a third program per multiprocessor, so it is used only where there is none.
    """
    return min(power_of_two(V, 1), 64), max(1, power_of_two(K, 1) // 32), programs <= 2 * processors


def late_slices(V: int, state: torch.dtype) -> tuple[int, int, bool, int]:
    """The same for a step with late writes to a state of this dtype, and the neighbouring columns of a thread.

    The compiler alone makes a thread load 16 bytes. Of 8 bits these are 16 columns, whose sums over K take four times
    the shuffles between threads and a third more registers than four columns.
    """
    width, columns = {torch.float32: (32, 2), torch.int8: (64, 4)}.get(state, (32, 4))
    return min(power_of_two(V, 1), width), 4, True, columns


def fold_rows(BK: int, BV: int, warps: int) -> int:
    """Rows of the state that a program folds late writes into at a time: 32 numbers per thread, at least 16 rows."""
    return max(16, min(BK, 1024 * warps // BV))


def step_warps(elements: int) -> int:
    """Warps of the step of several tokens with `elements` of state per program; more make the compiler repeat loads."""
    return max(1, min(4, elements // 2048))
