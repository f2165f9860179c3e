"""Exact splitting of long sequences: a segment's effect on the state is affine.

    S_out = M S_in + N,  M <- e^{G_last} M - K^T (rev (T (beta gamma (K M)))) from M = I

N is the state pass from zero, M the state pass from I with v = 0; both run for all segments at once. Then the states
entering the segments follow one after the other, in float32. Backward, dS_in = M^T dS_out + N'.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kernel_config import cdiv, power_of_two


@triton.jit
def _compose_kernel(
    M, N, initial, states, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HV: tl.constexpr,
    SEGMENTS: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, head, slice of V): M, N [rows, SEGMENTS, HV, ...] -> states entering each segment."""
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    n = (pid // (NV * HV)).to(tl.int64)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    mS = (d < K)[:, None] & (e < V)[None, :]
    mM = (d < K)[:, None] & (d < K)[None, :]
    at = d[:, None] * V + e[None, :]
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if INITIAL:
        S += tl.load(initial + (n * HV + head) * K * V + at, mask=mS, other=0.0).to(tl.float32)
    for step in range(SEGMENTS):
        s = SEGMENTS - 1 - step if REVERSE else step
        segment = (n * SEGMENTS + s) * HV + head
        tl.store(states + segment * K * V + at, S, mask=mS)
        if REVERSE:
            M_tile = tl.load(M + segment * K * K + d[None, :] * K + d[:, None], mask=mM, other=0.0)
        else:
            M_tile = tl.load(M + segment * K * K + d[:, None] * K + d[None, :], mask=mM, other=0.0)
        N_tile = tl.load(N + segment * K * V + at, mask=mS, other=0.0)
        S = N_tile + tl.dot(M_tile, S, input_precision=PRECISION)


def compose(
    M: torch.Tensor, N: torch.Tensor, initial: torch.Tensor | None, reverse: bool, precision: str
) -> torch.Tensor:
    """States [rows, segments, HV, K, V] entering each segment, from its M and N; from the end when `reverse`."""
    rows, segments, HV, K, V = N.shape
    states = torch.empty_like(N)
    BV = min(16, power_of_two(V))
    _compose_kernel[(rows * HV * cdiv(V, BV),)](
        M, N, initial, states, K=K, V=V, BK=power_of_two(K), BV=BV, HV=HV, SEGMENTS=segments,
        INITIAL=initial is not None, REVERSE=reverse, PRECISION="ieee" if precision == "ieee" else "tf32x3",
        num_warps=4,
    )  # fmt: skip
    return states


def segments_for(programs: int, chunks_a_row: int, multiprocessors: int) -> int:
    """How many segments to cut each sequence into so that the chip is full.

    1 when a fifth of it is busy already, or for short sequences: a cut costs one more state pass, twice as wide.
    """
    if 5 * programs >= multiprocessors:
        return 1
    return max(1, min(multiprocessors // max(programs, 1), chunks_a_row // 64))
