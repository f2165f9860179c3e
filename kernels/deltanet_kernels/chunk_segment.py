"""Splitting of long sequences into segments that run at once, without losing anything.

A segment's effect on the state is affine:

    S_out = M S_in + N,  M <- e^{G_last} M - K^T (rev (T (beta gamma (K M)))) from M = I

N is the state pass from zero, M the state pass from I with v = 0. Backward, dS_in = M^T dS_out + N'.

**Forgetting.** A token multiplies the state by e^{g_t} (I - beta_t k_t k_t^T), so it lengthens nothing by more than
e^{g_t} max(1, |1 - beta_t |k_t|^2|). The logarithms of that are summed over each chunk (chunk_scores.py). Where they
come to -200 over the last w chunks of a segment, what lies before them reaches the segment's end as nothing: the
largest float32 number, e^88.7 in each of 256 rows, times e^-200 is under half of the smallest one, e^-103.97. M is
zero, and N needs w chunks only. Backward it is the first w' chunks of a segment. With gates of -0.5 a token that is
seven chunks of 64, with -0.01 it is 313.

A table on the device, from `forgetting`, holds w and w' of every segment and state head. Segments that forget neither
backward nor forward remember (0 in the table), and so does one whose bound is NaN. The device also decides what becomes
of these, by their number:

    few    M and N of each are computed in full, and `compose` links them: exact, all segments at once, but three
           times the work (N and M, then the pass proper)
    many   they are not cut from what follows (backward: from what comes before): one program walks on through the
           next segment, and the program of that one has nothing to do

So a sequence of one slow and many fast heads costs no more than it would uncut, and fast heads fill the chip.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .chunk_prepare import Chunks, locate_row
from .kernel_config import cdiv, power_of_two

FORGOTTEN = tl.constexpr(-200.0)


@triton.jit
def _reach(bounds, first, step, n, HV: tl.constexpr, BLOCK: tl.constexpr):
    """How many of n chunks, chunk `first` and on by `step`, it takes to forget all before them; 0: more than n."""
    i = tl.arange(0, BLOCK)
    total = 0.0
    never = 1 << 30
    least = n * 0 + never
    for start in range(0, n, BLOCK):
        live = start + i < n
        x = tl.load(bounds + (first + step * (start + i)) * HV, mask=live, other=0.0)
        enough = live & (total + tl.cumsum(x, axis=0) <= FORGOTTEN)
        least = tl.minimum(least, tl.min(tl.where(enough, start + i + 1, never), axis=0))
        total += tl.sum(x, axis=0)
    return tl.where(least < never, least, 0)


@triton.jit(do_not_specialize=["T"])
def _forgetting_kernel(
    bounds, table, cu_seqlens, first_chunk, T, HV: tl.constexpr, C: tl.constexpr, SEGMENTS: tl.constexpr,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, state head, segment)."""
    pid = tl.program_id(0)
    s = pid % SEGMENTS
    head = (pid // SEGMENTS) % HV
    n = pid // (SEGMENTS * HV)
    row, _, _, length = locate_row(n, cu_seqlens, T, VARLEN)
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
    start, stop = _segment(s, tl.cdiv(length, C), SEGMENTS)
    own = bounds + chunk * HV + head
    forward = _reach(own, stop - 1, -1, stop - start, HV, BLOCK)
    backward = _reach(own, start, 1, stop - start, HV, BLOCK)
    forgets = (forward > 0) & (backward > 0)
    tl.store(table + 1 + 2 * pid, tl.where(forgets, forward, 0))
    tl.store(table + 2 + 2 * pid, tl.where(forgets, backward, 0))
    tl.atomic_add(table, tl.where(forgets | (start == stop), 0, 1))


def forgetting(bounds: torch.Tensor, chunks: Chunks, segments: int) -> torch.Tensor:
    """Bounds [chunks, HV] -> int32: how many segments remember, then w, w' for [rows, HV, segments]."""
    HV = bounds.shape[1]
    programs = chunks.rows * HV * segments
    table = torch.zeros(1 + 2 * programs, dtype=torch.int32, device=bounds.device)
    if programs:
        _forgetting_kernel[(programs,)](
            bounds, table, chunks.cu_seqlens, chunks.first_chunk, chunks.tokens, HV=HV, C=chunks.size,
            SEGMENTS=segments, VARLEN=chunks.varlen, BLOCK=128, num_warps=1,
        )  # fmt: skip
    return table


@triton.jit
def _segment(s, count, SEGMENTS: tl.constexpr):
    """Chunks [start, stop) of segment s of a sequence of `count` chunks."""
    share = tl.cdiv(count, SEGMENTS)
    return tl.minimum(s * share, count), tl.minimum(s * share + share, count)


@triton.jit
def transition_span(
    table, composed, n, s, head, count, linear, HV: tl.constexpr, SEGMENTS: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """Chunks that the pass for N, or where `linear` for M, of a segment walks, and whether it is needed."""
    start, stop = _segment(s, count, SEGMENTS)
    at = table + 1 + 2 * ((n * HV + head) * SEGMENTS + s)
    warm = tl.load(at + 1) if REVERSE else tl.load(at)
    whole = (warm == 0) & (tl.load(table) <= composed)
    outermost = s == (0 if REVERSE else SEGMENTS - 1)  # nothing follows that would need N
    needed = tl.where(linear, whole, (whole | (warm > 0)) & (outermost == 0))
    walked = tl.where(needed, tl.where(whole, stop - start, warm), 0)
    if REVERSE:
        stop = start + walked
    else:
        start = stop - walked
    return start, stop, needed


@triton.jit
def segment_span(
    table, composed, n, s, head, count, HV: tl.constexpr, SEGMENTS: tl.constexpr, POWER: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Chunks [start, stop) that the program of a segment walks: none where it is not cut from the one before.

    (From the one behind where REVERSE.) Then whether the walk ends where the sequence does.
    """
    if SEGMENTS == 1:
        return count * 0, count, count >= 0
    j = tl.arange(0, POWER)
    warm = tl.load(table + 1 + 2 * ((n * HV + head) * SEGMENTS + j), mask=j < SEGMENTS, other=0)
    cut = (j < SEGMENTS) & ((warm > 0) | (tl.load(table) <= composed))
    if REVERSE:
        last = tl.max(tl.where(cut & (j <= s), j, 0), axis=0)
        runs = (s == SEGMENTS - 1) | (tl.max(tl.where(j == s + 1, cut.to(tl.int32), 0), axis=0) > 0)
        ends = runs & (last == 0)
        start, _ = _segment(last, count, SEGMENTS)
        _, stop = _segment(s, count, SEGMENTS)
        return tl.where(runs, start, stop), stop, ends
    last = tl.min(tl.where(cut & (j >= s), j, SEGMENTS - 1), axis=0)
    runs = (s == 0) | (tl.max(tl.where(j == s - 1, cut.to(tl.int32), 0), axis=0) > 0)
    ends = runs & (last == SEGMENTS - 1)
    start, _ = _segment(s, count, SEGMENTS)
    _, stop = _segment(last, count, SEGMENTS)
    return start, tl.where(runs, stop, start), ends


@triton.jit(do_not_specialize=["composed"])
def _compose_kernel(
    M, N, initial, states, table, composed,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HV: tl.constexpr, SEGMENTS: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
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
    at = d[:, None] * V + e[None, :]
    few = tl.load(table) <= composed
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if INITIAL:
        S += tl.load(initial + (n * HV + head) * K * V + at, mask=mS, other=0.0).to(tl.float32)
    for step in range(SEGMENTS):
        s = SEGMENTS - 1 - step if REVERSE else step
        segment = (n * SEGMENTS + s) * HV + head
        tl.store(states + segment * K * V + at, S, mask=mS)
        remembers = few & (tl.load(table + 1 + 2 * ((n * HV + head) * SEGMENTS + s)) == 0)
        mM = (d < tl.where(remembers, K, 0))[:, None] & (d < K)[None, :]
        if REVERSE:
            M_tile = tl.load(M + segment * K * K + d[None, :] * K + d[:, None], mask=mM, other=0.0)
        else:
            M_tile = tl.load(M + segment * K * K + d[:, None] * K + d[None, :], mask=mM, other=0.0)
        N_tile = tl.load(N + segment * K * V + at, mask=mS, other=0.0)
        S = N_tile + tl.where(remembers, tl.dot(M_tile, S, input_precision=PRECISION), 0.0)


def compose(
    M: torch.Tensor, N: torch.Tensor, initial: torch.Tensor | None, table: torch.Tensor, composed: int,
    reverse: bool, precision: str,
) -> torch.Tensor:  # fmt: skip
    """States [rows, segments, HV, K, V] entering each segment, from its M and N; from the end when `reverse`."""
    rows, segments, HV, K, V = N.shape
    states = torch.empty_like(N)
    BV = min(16, power_of_two(V))
    if rows:
        _compose_kernel[(rows * HV * cdiv(V, BV),)](
            M, N, initial, states, table, composed, K=K, V=V, BK=power_of_two(K), BV=BV, HV=HV, SEGMENTS=segments,
            INITIAL=initial is not None, REVERSE=reverse, PRECISION="ieee" if precision == "ieee" else "tf32x3",
            num_warps=4,
        )  # fmt: skip
    return states


def segments_for(programs: int, chunks_a_row: int, multiprocessors: int) -> int:
    """How many segments to cut each sequence into so that the chip is full.

    1 when a fifth of it is busy already, or for short sequences: where states are remembered a cut costs one more
    state pass, twice as wide.
    """
    if 5 * programs >= multiprocessors:
        return 1
    return max(1, min(multiprocessors // max(programs, 1), chunks_a_row // 64))


def composed_at_most(segments: int, slices: int, multiprocessors: int) -> int:
    """Up to how many remembering segments get an M, each with its N in `slices` slices of V."""
    return multiprocessors * (segments - 2) // (2 * slices)
