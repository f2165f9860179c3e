"""One decoding step of the attention over window and sinks in one kernel, which updates the cache in place.

    q, k = rope(q), rope(k)                                                                   optional
    n = count + 1;  place = n - 1 if n <= sinks, else sinks + n % window
    o = softmax(scale q K^T) V, of capped scores with a cap, over the places whose token n sees, and the token itself

Inside, scores and their log-sum-exp are in units of log 2.

A program computes up to four query heads that share a key head. The programs of a row take the count, and tickets with
it, from one atomic addition: tickets are kept in the bits above the count, and the last program writes the new count.
So none reads a count that another has already moved on. The program of a key head's first query head writes the new key
and value; the others take them from k and v, and give the place that is being written the weight 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc, var-annotated"
# ruff: noqa: RUF005 (Triton does not know starred tuples)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import power_of_two
from deltanet_kernels.common.slots import row_size
from deltanet_kernels.gated_delta_rule.config import check_supported
from deltanet_kernels.window.calls import WindowStepCall
from deltanet_kernels.window.config import step_heads, step_places
from deltanet_kernels.window.softcap import cap_score
from deltanet_kernels.window.tiles import HIDDEN, LOG2E, LOGE2

COUNT_BITS = 23  # of the 31 below the sign; the tickets have the others
MAX_PROGRAMS = 2 ** (31 - COUNT_BITS) - 1  # per row


@triton.jit
def take_ticket(count, b, live, PROGRAMS: tl.constexpr, COUNT_BITS: tl.constexpr):
    """The number of the row's token, or of its last one if it is padding; the last program writes it."""
    if PROGRAMS == 1:
        number = tl.load(count + b) + live
        tl.store(count + b, number)
    else:
        taken = tl.atomic_add(count + b, 1 << COUNT_BITS, sem="relaxed")
        number = (taken & ((1 << COUNT_BITS) - 1)) + live
        tl.store(count + b, number, mask=(taken >> COUNT_BITS) == PROGRAMS - 1)
    return number


@triton.jit
def turned(
    x, cos, sin, b, d, m, R: tl.constexpr, ROPE_ROWS: tl.constexpr,
):  # fmt: skip
    """Channels d (masked by m) of the head at x in float32; the first R are rotated, then rounded as in the cache."""
    y = tl.load(x + d, mask=m, other=0.0).to(tl.float32)
    if R > 0:
        m_r = m & (d < R)
        partner = tl.load(x + tl.where(d < R // 2, d + R // 2, d - R // 2), mask=m_r, other=0.0).to(tl.float32)
        at = (b if ROPE_ROWS else b * 0) * R + d
        y = y * tl.load(cos + at, mask=m_r, other=1.0).to(tl.float32)
        y += tl.where(d < R // 2, -partner, partner) * tl.load(sin + at, mask=m_r, other=0.0).to(tl.float32)
        y = y.to(x.dtype.element_ty).to(tl.float32)
    return y


@triton.jit
def step_kernel(
    q, k, v, keys, values, numbers, count, padding, cos, sin, o, lse, slots, scale,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    HEADS: tl.constexpr, BN: tl.constexpr, PADDING: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr,
    ROPE_ROWS: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, KEYS_ROW: tl.constexpr,
    VALUES_ROW: tl.constexpr, NUMBERS_ROW: tl.constexpr, COUNT_ROW: tl.constexpr, COUNT_BITS: tl.constexpr,
):  # fmt: skip
    """One program per row and HEADS query heads; rows of q, k and v are X_ROW elements apart."""
    PROGRAMS: tl.constexpr = HQ // HEADS
    PLACES: tl.constexpr = WINDOW + SINKS
    GROUP: tl.constexpr = HQ // HK
    first = (tl.program_id(0) % PROGRAMS) * HEADS
    b = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    live = 1
    if PADDING:
        live = 1 - tl.load(padding + b).to(tl.int32)
    if slots is not None:  # row b of the cache is that of the slot; what sequences share is left alone
        slot = tl.load(slots + b).to(tl.int64)
        live *= (slot > 0).to(tl.int32)
        keys += slot * KEYS_ROW - b * (HK * PLACES * D)
        values += slot * VALUES_ROW - b * (HK * PLACES * D)
        numbers += slot * NUMBERS_ROW - b * PLACES
        count += slot * COUNT_ROW - b
    n = take_ticket(count, b, live, PROGRAMS, COUNT_BITS)
    d = tl.arange(0, BD)
    m_d = d < D
    at = (b * HQ + first) * D + d
    if live == 0:
        for g in tl.static_range(HEADS):
            tl.store(o + at + g * D, tl.zeros([BD], dtype=o.dtype.element_ty), mask=m_d)
            tl.store(lse + b * HQ + first + g, 0.0)
        return
    place = tl.where(n <= SINKS, n - 1, SINKS + n % WINDOW)
    kept = b * HK + first // GROUP
    k_D = turned(k + b * K_ROW + (first // GROUP) * D, cos, sin, b, d, m_d, R, ROPE_ROWS)
    v_D = tl.load(v + b * V_ROW + (first // GROUP) * D + d, mask=m_d, other=0.0)
    keys += kept * (PLACES * D)
    values += kept * (PLACES * D)
    if first % GROUP == 0:
        tl.store(keys + place * D + d, k_D.to(keys.dtype.element_ty), mask=m_d)
        tl.store(values + place * D + d, v_D, mask=m_d)
    if first == 0:
        tl.store(numbers + b * PLACES + place, n)
    qs = ()
    tops = ()
    totals = ()
    sums = ()
    for g in tl.static_range(HEADS):
        q_D = turned(q + b * Q_ROW + (first + g) * D, cos, sin, b, d, m_d, R, ROPE_ROWS)
        q_D = q_D * (scale * LOG2E if CAP is None else scale / CAP)
        qs = qs + (q_D,)
        tops = tops + (cap_score(tl.sum(q_D * k_D, axis=0), CAP),)
        totals = totals + (tl.full([], 1.0, tl.float32),)
        sums = sums + (v_D.to(tl.float32),)
    for start in range(0, PLACES, BN):
        j = start + tl.arange(0, BN)
        number = tl.load(numbers + b * PLACES + j, mask=j < PLACES, other=0)
        seen = (number > 0) & ((n - number < WINDOW) | (number <= SINKS)) & (j != place)
        m = (j < PLACES)[:, None] & m_d[None, :]
        k_ND = tl.load(keys + j[:, None] * D + d[None, :], mask=m, other=0.0).to(tl.float32)
        v_ND = tl.load(values + j[:, None] * D + d[None, :], mask=m, other=0.0).to(tl.float32)
        new_tops = ()
        new_totals = ()
        new_sums = ()
        for g in tl.static_range(HEADS):
            s = tl.where(seen, cap_score(tl.sum(k_ND * qs[g][None, :], axis=1), CAP), HIDDEN)
            top = tl.maximum(tops[g], tl.max(s, axis=0))
            p = tl.exp2(s - top)
            fade = tl.exp2(tops[g] - top)
            new_tops = new_tops + (top,)
            new_totals = new_totals + (totals[g] * fade + tl.sum(p, axis=0),)
            new_sums = new_sums + (sums[g] * fade + tl.sum(p[:, None] * v_ND, axis=0),)
        tops = new_tops
        totals = new_totals
        sums = new_sums
    for g in tl.static_range(HEADS):
        tl.store(o + at + g * D, (sums[g] / totals[g]).to(o.dtype.element_ty), mask=m_d)
        tl.store(lse + b * HQ + first + g, (tops[g] + tl.log2(totals[g])) * LOGE2)


def _fake_step(q, *_):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(_fake_step, mutates=("keys", "values", "numbers", "count"))
def window_step_op_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, sinks: int, keys: torch.Tensor,
    values: torch.Tensor, numbers: torch.Tensor, count: torch.Tensor, scale: float, padding: torch.Tensor | None,
    softcap: float | None, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return o [B, 1, HQ, D] and lse [B, 1, HQ], and update the cache in place."""
    (B, _, HQ, D), HK = q.shape, k.shape[2]
    o, lse = _fake_step(q)
    heads = step_heads(HQ // HK, B * HQ, multiprocessors(q.device))
    (q, q_row), (k, k_row), (v, v_row) = rows(q), rows(k), rows(v)
    dense = [None if x is None else x.contiguous() for x in (padding, cos, sin)]
    launch(
        step_kernel, B * (HQ // heads),
        q, k, v, keys, values, numbers, count, *dense, o, lse, slots, scale,
        HQ=HQ, HK=HK, D=D, BD=power_of_two(D), WINDOW=window, SINKS=sinks,
        HEADS=heads, BN=step_places(D, window + sinks), PADDING=padding is not None, CAP=softcap,
        R=0 if cos is None else cos.shape[2], ROPE_ROWS=cos is not None and cos.shape[0] > 1, Q_ROW=q_row, K_ROW=k_row,
        V_ROW=v_row, KEYS_ROW=row_size(keys), VALUES_ROW=row_size(values), NUMBERS_ROW=row_size(numbers),
        COUNT_ROW=row_size(count), COUNT_BITS=COUNT_BITS, num_warps=4,
    )  # fmt: skip
    return o, lse


def window_step_triton_(call: WindowStepCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_step_` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, more than 255 query heads, or dtypes other than float32, bfloat16,
            float16.
    """
    HQ, D = call.q.shape[2:]
    check_supported(call.q.dtype, D, D)
    if HQ > MAX_PROGRAMS:
        raise NotImplementedError(f"{HQ} query heads: the kernel takes up to {MAX_PROGRAMS}")
    found: tuple[torch.Tensor, torch.Tensor] = window_step_op_(*call[:9], call.factor, *call[10:])
    return found
