"""Cuts long sequences into segments that run in parallel, with exact results.

The effect of a segment on the state is affine:

    S_out = M S_in + N,  M <- e^{G_last} M - K^T (rev (T (beta gamma (K M)))) from M = I

N is the result of the state kernel started from zero, M its result started from I with v = 0. Backward,
dS_in = M^T dS_out + N'.

**Forgetting.** A token multiplies the state by e^{g_t} (I - beta_t k_t k_t^T), which lengthens no vector by more than
e^{g_t} max(1, |1 - beta_t |k_t|^2|). scores.py sums the logarithms of that bound over each chunk. Where they add up to
-200 over the last w chunks of a segment, nothing of the state before those chunks reaches the segment's end: the
largest float32 number, e^88.7 in each of 256 rows, times e^-200 is under half of the smallest one, e^-103.97. Then M is
zero, and N requires only w chunks. Backward, the first w' chunks of a segment suffice in the same way. With gates of
-0.5 per token that is seven chunks of 64, with -0.01 it is 313.

A segment forgets if both w and w' exist; otherwise, or if a bound is NaN, it remembers. `composes` chooses between two
treatments of segments that remember, by the number of segments:

    composed    their M and N are computed in full and `compose` links them: all segments run in parallel, for three
                times the work (N and M, then the state kernel itself)
    sequential  they are not cut from the next segment (backward: from the previous one): one program continues
                through the next segment, and the program of that segment has nothing to do

The device therefore decides, per segment and state head, which chunks a program processes. `chunk_spans` writes that
table, int32 [rows, HV, segments, 5, 2]: the chunks [start, stop) of the passes WALK (forward), WALK_BACK (backward),
N_PASS, N_BACK and M_PASS. Where start > stop a program has nothing to do and nothing to write.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.sequences import Chunks, locate_row
from deltanet_kernels.common.sizes import cdiv, power_of_two

FORGOTTEN = tl.constexpr(-200.0)
WALK, WALK_BACK, N_PASS, N_BACK, M_PASS = (tl.constexpr(j) for j in range(5))
MAX_SEGMENTS = 64
MAX_COMPOSED_KEY = 128  # M [K, K] in float32 is held in shared memory


@triton.jit
def load_span(table, n, head, s, which, HV: tl.constexpr, SEGMENTS: tl.constexpr):
    """First and last + 1 of the chunks that a pass processes for segment s."""
    at = table + 10 * ((n * HV + head) * SEGMENTS + s) + 2 * which
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _reach(bounds, first, step, n, longest, HV: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr):
    """Chunks, from `first` in steps of `step`, that forget everything before them; 0 if that takes more than n."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros([POWER], dtype=tl.float32)
    never = 1 << 30
    least = n * 0 + never
    for start in range(0, longest, BLOCK):
        at = (start + i)[None, :]
        live = at < n[:, None]
        x = tl.load(bounds + (first[:, None] + step * at) * HV, mask=live, other=0.0)
        sums = total[:, None] + tl.cumsum(x, axis=1)
        # Both carried inside the reductions: Triton 3.6 does not compile `total += tl.sum(...)` in such a loop.
        total = tl.sum(tl.where(i[None, :] == BLOCK - 1, sums, 0.0), axis=1)
        found = tl.where(live & (sums <= FORGOTTEN), at + 1, never)
        least = tl.min(tl.minimum(found, least[:, None]), axis=1)
    return tl.where(least < never, least, 0)


@triton.jit
def _store_span(table, which, needed, start, stop, mask):
    tl.store(table + 2 * which, tl.where(needed, start, 1), mask=mask)
    tl.store(table + 2 * which + 1, tl.where(needed, stop, 0), mask=mask)


@triton.jit(do_not_specialize=["T"])
def chunk_spans_kernel(
    bounds, table, cu_seqlens, first_chunk, T, HV: tl.constexpr, C: tl.constexpr, SEGMENTS: tl.constexpr,
    POWER: tl.constexpr, COMPOSED: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of chunks per pass; one program per (sequence, state head)."""
    head = tl.program_id(0) % HV
    n = tl.program_id(0) // HV
    row, _, _, length = locate_row(n, cu_seqlens, T, VARLEN)
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
    count = tl.cdiv(length, C)
    share = tl.cdiv(count, SEGMENTS)
    s = tl.arange(0, POWER)
    exists = s < SEGMENTS
    start = tl.minimum(s * share, count)
    stop = tl.where(exists, tl.minimum(start + share, count), start)
    own = bounds + chunk * HV + head
    before = _reach(own, stop - 1, -1, stop - start, share, HV, POWER, BLOCK)
    behind = _reach(own, start, 1, stop - start, share, HV, POWER, BLOCK)
    forgets = (before > 0) & (behind > 0)
    spans = table + 10 * (tl.program_id(0) * SEGMENTS + s)
    remembers = exists & (forgets == 0) if COMPOSED else s < 0
    needed = (forgets | remembers) & (s < SEGMENTS - 1)
    _store_span(spans, N_PASS, needed, tl.where(forgets, stop - before, start), stop, exists)
    needed = (forgets | remembers) & (s > 0)
    _store_span(spans, N_BACK, needed, start, tl.where(forgets, start + behind, stop), exists)
    _store_span(spans, M_PASS, remembers, start, stop, exists)

    # A pass ends after a segment (backward: before it) if the state to start the next one from is known.
    cut = (forgets | remembers)[None, :]
    i = s[None, :]
    j = s[:, None]
    last = tl.min(tl.where(cut & (i >= j), i, SEGMENTS - 1), axis=1)
    known = tl.max(tl.where(cut & (i == j - 1), 1, 0), axis=1) > 0
    last_stop = tl.minimum((last + 1) * share, count)
    _store_span(spans, WALK, (s == 0) | (known & (start < stop)), start, last_stop, exists)
    last = tl.max(tl.where(cut & (i <= j), i, 0), axis=1)
    known = tl.max(tl.where(cut & (i == j + 1), 1, 0), axis=1) > 0
    last_start = tl.minimum(last * share, count)
    _store_span(spans, WALK_BACK, (s == SEGMENTS - 1) | (known & (start < stop)), last_start, stop, exists)


def chunk_spans(bounds: torch.Tensor, chunks: Chunks, segments: int, composed: bool) -> torch.Tensor:
    """The chunks that each program of the state kernels processes, from the bounds [chunks, HV]; layout above."""
    HV = bounds.shape[1]
    table = torch.empty(chunks.rows, HV, segments, 5, 2, dtype=torch.int32, device=bounds.device)
    if table.numel():
        power = power_of_two(segments, 1)
        launch(
            chunk_spans_kernel, chunks.rows * HV,
            bounds, table, chunks.cu_seqlens, chunks.first_chunk, chunks.tokens, HV=HV, C=chunks.size,
            SEGMENTS=segments, POWER=power, COMPOSED=composed, VARLEN=chunks.varlen,
            BLOCK=max(32, 512 // power), num_warps=4,
        )  # fmt: skip
    return table


@triton.jit
def _compose_kernel(
    states, M, initial, table, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HV: tl.constexpr, SEGMENTS: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the first state, and add M S_in to the N of the others; one program per (sequence, head, slice of V)."""
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    n = (pid // (NV * HV)).to(tl.int64)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    mS = (d < K)[:, None] & (e < V)[None, :]
    mM = (d < K)[:, None] & (d < K)[None, :]
    at = states + d[:, None] * V + e[None, :]
    first = SEGMENTS - 1 if REVERSE else 0
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if initial is not None:
        S += tl.load(initial + (n * HV + head) * K * V + d[:, None] * V + e[None, :], mask=mS, other=0.0)
    tl.store(at + ((n * SEGMENTS + first) * HV + head) * K * V, S, mask=mS)
    if M is not None:
        for step in tl.range(0, SEGMENTS - 1, num_stages=2):
            s = SEGMENTS - 1 - step if REVERSE else step
            segment = (n * SEGMENTS + s) * HV + head
            to = at + (segment - HV if REVERSE else segment + HV) * K * V
            # Nothing is read behind a branch, so that no load waits for another.
            start, stop = load_span(table, n, head, s, M_PASS, HV, SEGMENTS)
            if REVERSE:
                M_tile = tl.load(M + segment * K * K + d[None, :] * K + d[:, None], mask=mM, other=0.0)
            else:
                M_tile = tl.load(M + segment * K * K + d[:, None] * K + d[None, :], mask=mM, other=0.0)
            N = tl.load(to, mask=mS, other=0.0)
            S = N + tl.where(start <= stop, tl.dot(M_tile, S, input_precision=PRECISION), 0.0)
            tl.store(to, S, mask=mS)


def compose(
    M: torch.Tensor | None, states: torch.Tensor, initial: torch.Tensor | None, table: torch.Tensor,
    reverse: bool, precision: str,
) -> None:  # fmt: skip
    """Turn `states` [rows, segments, HV, K, V] into the states that enter each segment; from the end if `reverse`.

    On entry it holds, per segment, the N of the previous segment (backward: of the next one); the entry of the first
    (backward: the last) segment is ignored. M is None where nothing is composed. `initial` [rows, HV, K, V] is
    contiguous, None for zeros.
    """
    rows, segments, HV, K, V = states.shape
    if rows:
        BV = min(16, power_of_two(V))
        launch(
            _compose_kernel, rows * HV * cdiv(V, BV),
            states, M, initial, table, K=K, V=V, BK=power_of_two(K), BV=BV, HV=HV, SEGMENTS=segments, REVERSE=reverse,
            PRECISION="ieee" if precision == "ieee" else "tf32x3", num_warps=8,
        )  # fmt: skip


def segments_for(programs: int, chunks_a_row: int, multiprocessors: int) -> int:
    """The number of segments per sequence, given that `programs` programs would process uncut sequences.

    A program has at most 64 columns of the state here: on an H200 (head size 128, bfloat16) it takes 1.5 us per chunk,
    with 128 columns 2.6. Wider slices with more segments were no faster over forward and backward, and much slower
    where segments remember. Where those are composed, twice the segments let the passes of some heads fill the chip:
    131072 tokens x 16 heads, where every second head remembers, 2.92 / 8.65 ms in four, 2.42 / 7.83 in eight, and no
    difference if none does. That many only of 64 chunks or more: 65536 x 4 that remember took 0.46 / 1.29 ms in 16
    segments and 0.55 / 1.45 in 33, 32768 x 9 of 64 0.37 ms forward in 8 and 0.30 in 14. Under 256 chunks in all the
    launches cost the host more than they save.
    """
    segments = multiprocessors // max(programs, 1)
    if segments < 2 or chunks_a_row < 256:
        return 1
    if segments >= 4:
        segments = max(segments, min(2 * segments, chunks_a_row // 64))
    return min(segments, chunks_a_row // 32, MAX_SEGMENTS)


def composes(segments: int, K: int) -> bool:
    """Whether segments that remember are composed, not processed sequentially.

    Composing takes three passes over a segment instead of one over a sequence. On an H200, forward / forward +
    backward when all segments remember: 131072 tokens x 16 heads of 128 in four segments 2.99 / 8.72 ms composed,
    4.19 / 12.05 sequential, uncut 4.07 / 11.98; 32768 x 32 in two 1.29 / 4.25 sequential, 1.24 / 4.21 uncut, and in
    four 1.46 / 4.39 composed.
    """
    return segments >= 4 and K <= MAX_COMPOSED_KEY
