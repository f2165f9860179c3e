"""The rule read at boundaries: the states, and the outputs where no query heads share one.

With S the state that enters a chunk of 64 tokens, halves 0 and 1, and the symbols of gated_delta_rule/__init__.py:

    U = K S;  W = beta (V - gamma U);  V' = T W
    O_0 = scale Q_0 S;  S <- e^{G_31} S + K_0^T (e^{G_31 - G} V'_0)
    O_1 = scale Q_1 S;  S <- e^{G_63 - G_31} S + K_1^T (rev V'_1)

The state between the halves costs no product, since the two updates have the size of one. A chunk of 32 tokens is a
first half alone. As in gated_delta_rule/states.py everything is computed transposed, and one program processes the
chunks of a sequence in order, with its slice of the state in registers. The norms of the queries are computed here,
where they are read: nothing else of the forward pass reads them.

A segment changes the state as it does in the rule itself, so gated_delta_rule/states.py computes the maps of segments.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import middle_decays, output_factors, row_factors, state_factors
from deltanet_kernels.gated_delta_rule.segments import WALK, load_span
from deltanet_kernels.group_rule.read import read_state


@triton.jit
def _wanted(
    S, k_tile, v_at, quads, at_row, i, live, me, FULL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """W of a group, transposed [BV, 32], float32."""
    dtype = k_tile.dtype
    v_tile = load_tile(v_at, me[:, None] & live[None, :], FULL)
    U = tl.dot(S, tl.trans(k_tile), input_precision=PRECISION)
    beta, erase, _, _ = row_factors(quads, at_row, i, live, FULL)
    if dtype != tl.float32:
        # As an operand of a product V comes through shared memory (gated_delta_rule/states.py).
        v_tile = tl.dot(v_tile, tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dtype))
    return beta[None, :] * v_tile + erase[None, :] * U


@triton.jit(do_not_specialize=["T"])
def group_states_kernel(
    q, k, v, factors, Tm, h0, o, h, vn, ht, table, cu_seqlens, first_chunk, scale, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, v_row, v_token: tl.constexpr, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, SEGMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Process chunks in order; one program per (sequence, segment, state head, slice of V).

    OUTPUT requires HQ <= HV.
    """
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    segment = pid // (NV * HV)
    n = segment // SEGMENTS
    sequence = n.to(tl.int64)
    row = sequence
    if VARLEN:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        T = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32)
        chunk = tl.load(first_chunk + n).to(tl.int64)
        row = begin * 0
        q += begin * q_token
        k += begin * k_token
        v += begin * v_token
    i = tl.arange(0, 32)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    md = d < K
    me = e < V
    mS = me[:, None] & md[None, :]
    outer = d[None, :] * V + e[:, None]
    state = segment.to(tl.int64) * HV + head
    S = tl.zeros([BV, BK], dtype=tl.float32)
    if INITIAL:
        S += load_tile(h0 + state * K * V + outer, mS, FULL).to(tl.float32)

    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head
    v_base = v + row * v_row + head.to(tl.int64) * v_head
    if OUTPUT:
        q_base = q + row * q_row + (head // (HV // HQ)).to(tl.int64) * q_head
    d_half = tl.arange(0, BK // 2)
    at_half = e[:, None] * K + d_half[None, :]
    k_at = i[:, None] * k_token + d[None, :]
    v_at = i[None, :] * v_token + e[:, None]
    q_at = i[:, None] * q_token + d[None, :]
    own_at = i[None, :] * (HV * V) + e[:, None]
    plane = tl.full([], HV, tl.int64) * tokens
    quads = state_factors(factors, plane)
    square = i[:, None] * C + i[None, :]
    dtype = k.dtype.element_ty
    count = tl.cdiv(T, C)
    start, stop = count * 0, count
    if SEGMENTS > 1:
        start, stop = load_span(table, n, head, segment % SEGMENTS, WALK, HV, SEGMENTS)
    for t in tl.range(start, stop, num_stages=STAGES):
        first = t * C
        valid = C if FULL else tl.minimum(T - first, C)
        live = i < valid
        token = first.to(tl.int64)
        at_row = head.to(tl.int64) * tokens + (begin if VARLEN else row * T) + token
        tile = Tm + (((chunk if VARLEN else row * count) + t) * HV + head) * (C * C) + square
        own = (((begin if VARLEN else row * T) + token) * HV + head) * V + own_at
        k_0 = load_tile(k_base + token * k_token + k_at, live[:, None] & md[None, :], FULL)
        T_00 = tl.load(tile)
        S_cast = S.to(dtype)
        if KEEP:
            # In two halves of K, as in gated_delta_rule/states.py.
            low, high = tl.split(tl.permute(tl.reshape(S_cast, [BV, 2, BK // 2]), [0, 2, 1]))
            h_base = h + (((chunk if VARLEN else row * count) + t) * HV + head) * (K * V)
            store_tile(h_base + at_half, low, me[:, None] & (d_half < K)[None, :], FULL)
            store_tile(h_base + at_half + BK // 2, high, me[:, None] & (d_half + BK // 2 < K)[None, :], FULL)
        W_0 = _wanted(S_cast, k_0, v_base + token * v_token + v_at, quads, at_row, i, live, me, FULL, PRECISION)
        if C == 64:
            late = i + 32 < valid
            k_1 = load_tile(k_base + (token + 32) * k_token + k_at, late[:, None] & md[None, :], FULL)
            T_10 = tl.load(tile + 32 * C)
            T_11 = tl.load(tile + 32 * C + 32)
            v_from = v_base + (token + 32) * v_token + v_at
            W_1 = _wanted(S_cast, k_1, v_from, quads, at_row + 32, i, late, me, FULL, PRECISION)
        if OUTPUT:
            reads = output_factors(factors, plane) + 4 * at_row
            read_state(
                S_cast, q_base + token * q_token + q_at, o + own, reads, 1.0, scale, i, i_v, live, md,
                me, FULL, NORM, KEEP, PRECISION,
            )  # fmt: skip
        V_0 = tl.dot(W_0.to(dtype), tl.trans(T_00), input_precision=PRECISION)
        if KEEP:
            store_tile(vn + own, V_0, me[:, None] & live[None, :], FULL)
        _, _, rev, r = row_factors(quads, at_row, i, live, FULL)
        if C == 64:
            V_1 = tl.dot(W_0.to(dtype), tl.trans(T_10), input_precision=PRECISION)
            V_1 = tl.dot(W_1.to(dtype), tl.trans(T_11), V_1, input_precision=PRECISION)
            if KEEP:
                store_tile(vn + own + 32 * HV * V, V_1, me[:, None] & late[None, :], FULL)
            until, fade, rest = middle_decays(factors + at_row, plane, i, valid, FULL)
            S = tl.dot((V_0 * (until * r)[None, :]).to(dtype), k_0, S * fade, input_precision=PRECISION)
            if OUTPUT:
                read_state(
                    S.to(dtype), q_base + (token + 32) * q_token + q_at, o + own + 32 * HV * V, reads + 4 * 32, fade,
                    scale, i, i_v, late, md, me, FULL, NORM, KEEP, PRECISION,
                )  # fmt: skip
            _, _, rev, _ = row_factors(quads, at_row + 32, i, late, FULL)
            S = tl.dot((V_1 * rev[None, :]).to(dtype), k_1, S * rest, input_precision=PRECISION)
        else:
            last = factors + at_row + valid - 1
            fade = tl.where(tl.load(last + plane) > 0.0, 0.0, tl.exp(tl.load(last)))
            S = tl.dot((V_0 * rev[None, :]).to(dtype), k_0, S * fade, input_precision=PRECISION)
    if FINAL:  # noqa: SIM102 (known when compiling; the next is not)
        if (start <= stop) & (stop == count):
            tl.store(ht + (sequence * HV + head) * K * V + outer, S, mask=mS)
