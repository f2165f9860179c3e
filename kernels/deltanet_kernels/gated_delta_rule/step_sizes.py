"""Sizes that the kernels of step.py are launched with."""

from __future__ import annotations

from deltanet_kernels.common.sizes import power_of_two


def step_slices(K: int, V: int, programs: int, processors: int) -> tuple[int, int, bool]:
    """Columns per slice of the one-token step, warps per program, and whether the next slice is loaded early.

    Slices have rows of 256 bytes of float32; narrower ones cost bandwidth. There is one thread per channel of q and k:
    with more threads the sums over K, which cross the warps, take longer than the loads. Loading early takes the
    registers of a third program per multiprocessor, so it is used only where there is none.
    """
    return min(power_of_two(V, 1), 64), max(1, power_of_two(K, 1) // 32), programs <= 2 * processors


def step_warps(elements: int) -> int:
    """Warps of the step of several tokens with `elements` of state per program; more make the compiler repeat loads."""
    return max(1, min(4, elements // 2048))
