"""Chunked gated delta rule, backward: gradients of the terms between two tokens of a chunk, all chunks in parallel.

Writes dV, dbeta, and Z, E and dG for gradients_inputs.py. states_backward.py has the formulas. E is not written
without an erase term, and with GROUPS (gradients_inputs.py) neither Z nor what the scores contribute to dG.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import (
    decay_between,
    decay_to,
    gamma_of,
    load_G,
    load_G_before,
    output_factors,
    row_after,
    row_factors,
    state_factors,
)


@triton.jit(do_not_specialize=["T"])
def pair_gradients_kernel(
    k, v, factors, P, do, h, vn, dw, Z_out, E_out, dG_out, dv, dbeta, cu_seqlens, row_of_chunk, first_chunk,
    scale, T, tokens, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    v_row, v_token: tl.constexpr, v_head, FORM: tl.constexpr,
):  # fmt: skip
    """Compute dV, dbeta, Z, E and dG [HV, B*T]; one program per (chunk, state head)."""
    HV: tl.constexpr = FORM.HV
    HQ: tl.constexpr = FORM.HQ
    K: tl.constexpr = FORM.K
    V: tl.constexpr = FORM.V
    BV: tl.constexpr = FORM.BV
    C: tl.constexpr = FORM.C
    VARLEN: tl.constexpr = FORM.VARLEN
    FULL: tl.constexpr = FORM.FULL
    READ: tl.constexpr = FORM.READ
    UNDECAYED: tl.constexpr = FORM.UNDECAYED
    GROUPS: tl.constexpr = FORM.GROUPS
    PRECISION: tl.constexpr = FORM.PRECISION
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = 0 if GROUPS else HO // HV
    pid = tl.program_id(0)
    head = pid % HV
    c = pid // HV
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, FORM.BK)
    live = i < valid
    dtype = k.dtype.element_ty
    strict = i[:, None] > i[None, :]
    square = i[:, None] * C + i[None, :]
    plane = tl.full([], HV, tl.int64) * tokens
    rows = factors + (head.to(tl.int64) * tokens + flat)
    G_i, s_i, _ = load_G(rows, plane, i, valid, FULL, PRECISION)
    at_row = head.to(tl.int64) * tokens + flat
    b_i, _, _, r_i = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
    own = (flat * HV + head) * V
    D = decay_between(G_i, s_i, i[:, None] >= i[None, :]) * r_i[None, :]

    dL = tl.zeros([C, C], dtype=tl.float32)
    dP = tl.zeros([C, C], dtype=tl.float32)
    db = tl.zeros([C], dtype=tl.float32)
    if GROUP == 1:
        # Loaded before the products that it is combined with elementwise: Triton takes the layout of the later one.
        P_tile = tl.load(P + (c.to(tl.int64) * HO + head) * (C * C) + square)
    o_base = do + row * o_row + (head * GROUP).to(tl.int64) * o_head + first * o_token
    for i_v in range(0, V, BV):
        e = i_v + tl.arange(0, BV)
        mV = live[:, None] & (e < V)[None, :]
        at = own + (i[:, None] * (HV * V) + e[None, :])
        vn_tile = load_tile(vn + at, mV, FULL)
        dw_tile = load_tile(dw + at, mV, FULL)
        store_tile(dv + at, b_i[:, None] * dw_tile.to(tl.float32), mV, FULL)
        if vn.dtype.element_ty != dtype:
            db += tl.sum(dw_tile.to(tl.float32) * vn_tile.to(tl.float32), axis=1)
        dL = tl.dot(dw_tile.to(dtype), tl.trans(vn_tile.to(dtype)), dL, input_precision=PRECISION)
        if GROUP == 1:
            do_tile = load_tile(o_base + (i[:, None] * o_token + e[None, :]), mV, FULL).to(dtype)
            dP = tl.dot(do_tile, tl.trans(vn_tile.to(dtype)), dP, input_precision=PRECISION)
    if vn.dtype.element_ty == dtype:
        db = tl.sum(tl.where(i[:, None] == i[None, :], dL, 0.0), axis=1)
    k_base = k + row * k_row + (head // (HV // FORM.H)).to(tl.int64) * k_head + first * k_token
    k_at = k_base + (i[:, None] * k_token + d[None, :])
    k_tile = load_tile(k_at, live[:, None] & (d < K)[None, :], FULL)
    if UNDECAYED:
        G_before, s_before = load_G_before(rows, plane, i, valid, PRECISION)
    if READ:
        D_erase = D
        if UNDECAYED:
            D_erase = decay_to(G_before, s_before, G_i, s_i, strict) * r_i[None, :]
        dL = tl.where(strict, dL * D_erase, 0.0) * r_i[:, None]
        tl.store(E_out + (c.to(tl.int64) * HV + head) * (C * C) + square, (dL * -b_i[:, None]).to(dtype))
        X = dL * tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
        X_row = tl.sum(X, axis=1)
        if UNDECAYED:
            # Neighbours have no gate between them; left out, they cannot blur a small gradient.
            far = tl.where(i[:, None] > i[None, :] + 1, X * b_i[:, None], 0.0)
            dG = tl.sum(far, axis=0) - row_after(tl.sum(far, axis=1), i)
        else:
            dG = tl.sum(X * b_i[:, None], axis=0) - b_i * X_row
    else:
        X_row = tl.zeros([C], dtype=tl.float32)
        dG = tl.zeros([C], dtype=tl.float32)
    if not GROUPS:
        for m in range(GROUP):
            out = head * GROUP + m
            if GROUP > 1:
                dP = tl.zeros([C, C], dtype=tl.float32)
                for i_v in range(0, V, BV):
                    e = i_v + tl.arange(0, BV)
                    mV = live[:, None] & (e < V)[None, :]
                    vn_tile = load_tile(vn + own + (i[:, None] * (HV * V) + e[None, :]), mV, FULL).to(dtype)
                    do_tile = load_tile(o_base + m * o_head + (i[:, None] * o_token + e[None, :]), mV, FULL).to(dtype)
                    dP = tl.dot(do_tile, tl.trans(vn_tile), dP, input_precision=PRECISION)
            tile = (c.to(tl.int64) * HO + out) * (C * C) + square
            if GROUP > 1:
                P_tile = tl.load(P + tile)
            Y = tl.where(strict, dP * P_tile.to(tl.float32), 0.0)
            dG += tl.sum(Y, axis=1) - tl.sum(Y, axis=0)
            f_i, _, _, _ = row_factors(output_factors(factors, plane), out.to(tl.int64) * tokens + flat, i, live, FULL)
            tl.store(Z_out + tile, (dP * D * (f_i * scale)[:, None]).to(dtype))
    tl.store(dG_out + head.to(tl.int64) * tokens + flat + i, dG, mask=live)

    if FORM.SIGMOID:
        db = (1.0 - b_i) * db
    else:
        zero_beta = live & (b_i == 0.0)
        db = db / tl.where(b_i == 0.0, 1.0, b_i)
        if tl.sum(zero_beta.to(tl.int32), axis=0) > 0:
            # beta = 0: the same sum without the division, rowsum(dW (V - gamma U - (D K K^T) V')).
            db0 = -X_row
            gamma_r = gamma_of(G_i, s_i) * r_i
            if UNDECAYED:
                gamma_r = gamma_of(G_before, s_before) * r_i
            for i_v in range(0, V, BV):
                e = i_v + tl.arange(0, BV)
                mV = live[:, None] & (e < V)[None, :]
                dw_tile = load_tile(dw + own + (i[:, None] * (HV * V) + e[None, :]), mV, FULL).to(tl.float32)
                v_base = v + row * v_row + head.to(tl.int64) * v_head + first * v_token
                v_tile = load_tile(v_base + (i[:, None] * v_token + e[None, :]), mV, FULL).to(tl.float32)
                if READ:
                    S_at = h + (c.to(tl.int64) * HV + head) * (K * V) + (e[:, None] * K + d[None, :])
                    S = load_tile(S_at, (e < V)[:, None] & (d < K)[None, :], FULL).to(dtype)
                    U = tl.dot(k_tile, tl.trans(S), input_precision=PRECISION)
                    v_tile -= gamma_r[:, None] * U
                db0 += tl.sum(dw_tile * v_tile, axis=1)
            db = tl.where(zero_beta, db0, db)
    tl.store(dbeta + (flat + i) * HV + head, db.to(dbeta.dtype.element_ty), mask=live)
