"""Chunked gated delta rule, third stage: the states and the outputs.

With S the state that enters the chunk (the package docstring defines the symbols):

    U = K S;  W = beta (V - gamma U);  V' = T W
    O = scale gamma (Q S) + P V';  S <- e^{G_last} S + K^T (rev V')

Without an erase term V' = W = beta V.

Each program processes the chunks of one sequence in order, with its slice of the state in registers. Everything is
computed transposed, S^T [BV, K], U^T, W^T, V'^T, O^T [BV, C]: each product then has its computed factor on the left,
which Hopper's tensor cores read from registers, and a loaded factor on the right. No data on the path from one chunk to
the next passes through shared memory. For the backward pass the kernel also writes V' and the states, as [V, K].

If sequences x heads do not fill the chip, each sequence is cut into segments that run in parallel (segments.py). A
table then says which chunks a program processes; nothing else changes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk, locate_row
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import output_factors, row_factors, state_factors
from deltanet_kernels.gated_delta_rule.segments import M_PASS, N_PASS, WALK, load_span


@triton.jit(do_not_specialize=["T"])
def states_kernel(
    q, k, v, factors, Tm, P, h0, o, h, vn, ht, M, table, cu_seqlens, first_chunk, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, v_row, v_token: tl.constexpr, v_head,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr, TRANSITION: tl.constexpr,
    SEGMENTS: tl.constexpr, COMPOSED: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Process chunks in order; one program per (sequence, segment, state head, slice of V).

    TRANSITION: compute only the map of each segment, where it is used. N is written to ht, as the state that enters
    the next segment; if COMPOSED, slices of M follow those of V.
    """
    HV: tl.constexpr = FORM.HV
    HQ: tl.constexpr = FORM.HQ
    K: tl.constexpr = FORM.K
    V: tl.constexpr = FORM.V
    BK: tl.constexpr = FORM.BK
    BV: tl.constexpr = FORM.BV
    C: tl.constexpr = FORM.C
    VARLEN: tl.constexpr = FORM.VARLEN
    FULL: tl.constexpr = FORM.FULL
    READ: tl.constexpr = FORM.READ
    PRECISION: tl.constexpr = FORM.PRECISION
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    SLICES: tl.constexpr = NV + (K + BV - 1) // BV if TRANSITION and COMPOSED else NV
    i_v = pid % SLICES
    head = (pid // SLICES) % HV
    segment = pid // (SLICES * HV)
    n = segment // SEGMENTS
    row, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    md = d < K
    me = e < V
    if TRANSITION:
        linear = i_v >= NV
        e = tl.where(linear, e - NV * BV, e)
        me = e < V
    mS = me[:, None] & md[None, :]
    d_half = tl.arange(0, BK // 2)
    at_half = e[:, None] * K + d_half[None, :]
    outer = d[None, :] * V + e[:, None]
    state = segment.to(tl.int64) * HV + head
    S = tl.zeros([BV, BK], dtype=tl.float32)
    if TRANSITION:
        S += tl.where(linear & (d[None, :] == e[:, None]), 1.0, 0.0)
    if INITIAL:
        S += load_tile(h0 + state * K * V + outer, mS, FULL).to(tl.float32)

    GROUP: tl.constexpr = HQ // HV if HQ > HV else 1
    HO: tl.constexpr = HQ if HQ > HV else HV
    # Scalar 64-bit bases and small 32-bit offsets inside a tile: 64-bit tiles of addresses would cost registers.
    k_base = k + row * k_row + (head // (HV // FORM.H)).to(tl.int64) * k_head + begin * k_token
    v_base = v + row * v_row + head.to(tl.int64) * v_head + begin * v_token
    q_base = q + row * q_row + begin * q_token
    k_at = i[:, None] * k_token + d[None, :]
    v_at = i[None, :] * v_token + e[:, None]
    q_at = i[:, None] * q_token + d[None, :]
    vn_at = i[None, :] * (HV * V) + e[:, None]
    o_at = i[None, :] * (HO * V) + e[:, None]
    plane = tl.full([], HV, tl.int64) * tokens
    rows = factors + (head.to(tl.int64) * tokens + flat)
    square = i[:, None] * C + i[None, :]
    dtype = k.dtype.element_ty
    # V I = V exactly: as an operand of a product V comes through shared memory like the rest. Triton would prefetch
    # 16-bit tiles that only elementwise code reads in registers, one value a register, and spill others.
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dtype)
    count = tl.cdiv(length, C)
    start, stop = count * 0, count
    if SEGMENTS > 1:
        which = tl.where(linear, M_PASS, N_PASS) if TRANSITION else WALK
        start, stop = load_span(table, n, head, segment % SEGMENTS, which, HV, SEGMENTS)
    for t in tl.range(start, stop, num_stages=STAGES):
        first = t * C
        valid = C if FULL else tl.minimum(length - first, C)
        live = i < valid
        token = first.to(tl.int64)
        k_tile = load_tile(k_base + token * k_token + k_at, live[:, None] & md[None, :], FULL)
        if READ:
            T_tile = tl.load(Tm + ((chunk + t) * HV + head) * (C * C) + square)
        v_mask = live[None, :] & me[:, None]
        if TRANSITION:
            # By rows: of a mask that is not the same for adjacent columns Triton would not prefetch the loads.
            v_mask = (i < tl.where(linear, 0, valid))[None, :] & me[:, None]
            v_tile = tl.load(v_base + token * v_token + v_at, mask=v_mask, other=0.0)
        else:
            v_tile = load_tile(v_base + token * v_token + v_at, v_mask, FULL)
        last = rows + (token + valid - 1)
        fade = tl.where(tl.load(last + plane) > 0.0, 0.0, tl.exp(tl.load(last)))

        S_cast = S.to(dtype)
        if KEEP:
            # In two halves of K: half the shared memory to bring the rows together.
            low, high = tl.split(tl.permute(tl.reshape(S_cast, [BV, 2, BK // 2]), [0, 2, 1]))
            h_base = h + ((chunk + t) * HV + head) * (K * V)
            store_tile(h_base + at_half, low, me[:, None] & (d_half < K)[None, :], FULL)
            store_tile(h_base + at_half + BK // 2, high, me[:, None] & (d_half + BK // 2 < K)[None, :], FULL)
        if READ:
            U = tl.dot(S_cast, tl.trans(k_tile), input_precision=PRECISION)
        at_row = head.to(tl.int64) * tokens + flat + token
        beta_i, erase, _, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
        if dtype != tl.float32:
            v_tile = tl.dot(v_tile.to(dtype), unit)
        W = beta_i[None, :] * v_tile
        if READ:
            W += erase[None, :] * U
        Vn = W
        if READ:
            Vn = tl.dot(W.to(dtype), tl.trans(T_tile), input_precision=PRECISION)
        if KEEP:
            store_tile(vn + ((flat + token) * HV + head) * V + vn_at, Vn, v_mask, FULL)
        if OUTPUT:
            for m in tl.static_range(GROUP):
                out = head * GROUP + m
                q_from = q_base + (out // (HO // HQ)).to(tl.int64) * q_head + token * q_token
                q_tile = load_tile(q_from + q_at, live[:, None] & md[None, :], FULL)
                P_tile = tl.load(P + ((chunk + t) * HO + out) * (C * C) + square)
                _, read, _, _ = row_factors(
                    output_factors(factors, plane), out.to(tl.int64) * tokens + flat + token, i, live, FULL
                )
                out_tile = tl.dot(S_cast, tl.trans(q_tile), input_precision=PRECISION) * read[None, :]
                out_tile = tl.dot(Vn.to(dtype), tl.trans(P_tile), out_tile, input_precision=PRECISION)
                store_tile(o + ((flat + token) * HO + out) * V + o_at, out_tile, v_mask, FULL)
        _, _, rev_r, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
        S = tl.dot((Vn * rev_r[None, :]).to(dtype), k_tile, S * fade, input_precision=PRECISION)
    if TRANSITION:
        if start <= stop:
            if linear:
                tl.store(M + state * K * K + (d[None, :] * K + e[:, None]), S, mask=md[None, :] & (e < K)[:, None])
            else:
                tl.store(ht + (state + HV) * K * V + outer, S, mask=mS)
    elif FINAL:  # noqa: SIM102 (known when compiling; the next is not)
        if (start <= stop) & (stop == count):
            tl.store(ht + (n.to(tl.int64) * HV + head) * K * V + outer, S, mask=mS)


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    q, factors, P, h, vn, o, cu_seqlens, row_of_chunk, first_chunk, T, tokens, q_row, q_token: tl.constexpr, q_head,
    HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute O from S and V' in memory; one program per (chunk, output head, slice of V)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    out = (pid // NV) % HO
    c = pid // (NV * HO)
    head = out // (HO // HV)
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    live = i < valid
    md = d < K
    me = e < V
    q_base = q + row * q_row + (out // (HO // HQ)).to(tl.int64) * q_head + first * q_token
    q_tile = load_tile(q_base + (i[:, None] * q_token + d[None, :]), live[:, None] & md[None, :], FULL)
    dtype = q.dtype.element_ty
    S_at = h + (c.to(tl.int64) * HV + head) * (K * V) + (e[:, None] * K + d[None, :])
    S = load_tile(S_at, me[:, None] & md[None, :], FULL)
    vn_at = vn + (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
    Vn = load_tile(vn_at, live[:, None] & me[None, :], FULL)
    P_tile = tl.load(P + (c.to(tl.int64) * HO + out) * (C * C) + i[:, None] * C + i[None, :])
    _, read, _, _ = row_factors(
        output_factors(factors, tl.full([], HV, tl.int64) * tokens), out.to(tl.int64) * tokens + flat, i, live, FULL
    )
    out_tile = tl.dot(q_tile, tl.trans(S.to(dtype)), input_precision=PRECISION) * read[:, None]
    out_tile = tl.dot(P_tile, Vn.to(dtype), out_tile, input_precision=PRECISION)
    o_at = o + (flat * HO + out) * V + (i[:, None] * (HO * V) + e[None, :])
    store_tile(o_at, out_tile, live[:, None] & me[None, :], FULL)
