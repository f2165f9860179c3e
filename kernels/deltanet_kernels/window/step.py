"""One decoding step of the attention over window and sinks in one kernel, which updates the cache in place.

    q, k = rope(q), rope(k)                                                                   optional
    n = count + 1;  place = n - 1 if n <= sinks, else sinks + n % window
    o = softmax(scale q K^T) V, of capped scores with a cap, over the places whose token n sees, and the token itself
    lse = the log-sum-exp of these scores

Inside, scores and their log-sum-exp are in units of log 2.

A program computes the query heads of a key head, by matrix products. The programs of a row take the count, and tickets
with it, from one atomic addition: tickets are kept in the bits above the count, and the last program writes the new
count. So none reads a count that another has already moved on. The place that is being written has the weight 0 among
the places; the token itself comes from k and v. It is put there at the end, so that no load waits for the count.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.config import check_supported, product_precision
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.online_softmax import HIDDEN, LOG2E, LOGE2, add_tile
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import power_of_two
from deltanet_kernels.common.state_indices import row_size
from deltanet_kernels.common.token_step import COUNT_BITS, MAX_PROGRAMS, take_ticket, turned
from deltanet_kernels.flash_decoding.config import decode_config
from deltanet_kernels.window.calls import WindowStepCall
from deltanet_kernels.window.softcap import cap_score


@triton.jit
def step_kernel(
    q, k, v, keys, values, numbers, count, padding, cos, sin, o, lse, state_indices, scale,
    HK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PADDING: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr,
    ROPE_ROWS: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, KEYS_ROW: tl.constexpr,
    VALUES_ROW: tl.constexpr, NUMBERS_ROW: tl.constexpr, COUNT_ROW: tl.constexpr, COUNT_BITS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per row and key head; rows of q, k and v are X_ROW elements apart. EXACT: see `add_tile`."""
    PLACES: tl.constexpr = WINDOW + SINKS
    pair = tl.program_id(0).to(tl.int64)
    b, h = pair // HK, pair % HK
    live = 1
    if PADDING:
        live = 1 - tl.load(padding + b).to(tl.int32)
    if state_indices is not None:  # row b of the cache is that of the index; what sequences share is left alone
        state_index = tl.load(state_indices + b).to(tl.int64)
        live *= (state_index > 0).to(tl.int32)
        keys += state_index * KEYS_ROW - b * (HK * PLACES * D)
        values += state_index * VALUES_ROW - b * (HK * PLACES * D)
        numbers += state_index * NUMBERS_ROW - b * PLACES
        count += state_index * COUNT_ROW - b
    n = take_ticket(count, b, live, HK, COUNT_BITS)
    g, d = tl.arange(0, BM), tl.arange(0, BD)
    m_g, m_d = g < GROUP, d < D
    m_q = m_g[:, None] & m_d[None, :]
    own = pair * GROUP + g
    if live == 0:
        tl.store(o + own[:, None] * D + d[None, :], tl.zeros([BM, BD], dtype=o.dtype.element_ty), mask=m_q)
        tl.store(lse + own, tl.zeros([BM], tl.float32), mask=m_g)
        return
    place = tl.where(n <= SINKS, n - 1, SINKS + n % WINDOW)
    heads = h * GROUP + g
    q_MD = turned(q + b * Q_ROW + heads[:, None] * D, cos, sin, b, d[None, :], m_q, R, ROPE_ROWS)
    k_D = turned(k + b * K_ROW + h * D, cos, sin, b, d, m_d, R, ROPE_ROWS)
    v_D = tl.load(v + b * V_ROW + h * D + d, mask=m_d, other=0.0)
    keys += pair * (PLACES * D)
    values += pair * (PLACES * D)
    numbers += b * PLACES
    factor = scale * LOG2E if CAP is None else scale / CAP
    top = cap_score(tl.sum(q_MD * k_D[None, :], axis=1) * factor, CAP)
    total = tl.full([BM], 1.0, tl.float32)
    sums = tl.zeros([BM, BD], tl.float32) + v_D.to(tl.float32)[None, :]
    q_MD = q_MD.to(keys.dtype.element_ty)
    for start in tl.range(0, PLACES, BN, num_stages=STAGES):
        j = start + tl.arange(0, BN)
        m = (j < PLACES)[:, None] & m_d[None, :]
        k_ND = tl.load(keys + j[:, None] * D + d[None, :], mask=m, other=0.0)
        v_ND = tl.load(values + j[:, None] * D + d[None, :], mask=m, other=0.0)
        number = tl.load(numbers + j, mask=j < PLACES, other=0)
        seen = (number > 0) & ((n - number < WINDOW) | (number <= SINKS)) & (j != place)
        s = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * factor
        s = tl.where(seen[None, :], cap_score(s, CAP), HIDDEN)
        top, total, sums = add_tile(s, v_ND, top, total, sums, EXACT, PRECISION)
    tl.store(o + own[:, None] * D + d[None, :], (sums / total[:, None]).to(o.dtype.element_ty), mask=m_q)
    tl.store(lse + own, (top + tl.log2(total)) * LOGE2, mask=m_g)
    tl.store(keys + place * D + d, k_D.to(keys.dtype.element_ty), mask=m_d)
    tl.store(values + place * D + d, v_D, mask=m_d)
    if h == 0:
        tl.store(numbers + place, n)


def _fake_step(call: WindowStepCall):
    q = call.q
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(_fake_step, mutates=("keys", "values", "numbers", "count"))
def window_step_op_(call: WindowStepCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, 1, HQ, D] and lse [B, 1, HQ], and update the cache in place."""
    (B, _, HQ, D), HK = call.q.shape, call.k.shape[2]
    keys, values, numbers, count = cache = call[5:9]
    o, lse = _fake_step(call)
    config = decode_config(D, call.q.dtype)
    (q, q_row), (k, k_row), (v, v_row) = rows(call.q), rows(call.k), rows(call.v)
    padding, cos, sin = (None if x is None else x.contiguous() for x in (call.padding, call.cos, call.sin))
    launch(
        step_kernel, B * HK,
        q, k, v, *cache, padding, cos, sin, o, lse, call.state_indices, call.factor,
        HK=HK, GROUP=HQ // HK, D=D, WINDOW=call.window, SINKS=call.sinks, BM=power_of_two(HQ // HK), BN=config.N,
        BD=config.D, PADDING=padding is not None, CAP=call.softcap, R=0 if cos is None else cos.shape[2],
        ROPE_ROWS=cos is not None and cos.shape[0] > 1, Q_ROW=q_row, K_ROW=k_row, V_ROW=v_row, KEYS_ROW=row_size(keys),
        VALUES_ROW=row_size(values), NUMBERS_ROW=row_size(numbers), COUNT_ROW=row_size(count), COUNT_BITS=COUNT_BITS,
        EXACT=q.dtype == torch.float32, STAGES=config.stages, PRECISION=product_precision("auto", q.dtype),
        num_warps=config.warps,
    )  # fmt: skip
    return o, lse


def window_step_triton_(call: WindowStepCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_step_` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, more than 255 key heads, or dtypes other than float32, bfloat16,
            float16.
    """
    HK, D = call.k.shape[2:]
    check_supported(call.q.dtype, D, D)
    if HK > MAX_PROGRAMS:
        raise NotImplementedError(f"{HK} key heads: the kernel takes up to {MAX_PROGRAMS}")
    return window_step_op_(call)
