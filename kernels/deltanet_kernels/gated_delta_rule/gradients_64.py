"""Chunked gated delta rule, backward: all gradients of a chunk and head in one program, for small heads.

states_backward.py has the formulas, also of undecayed predictions and of no erasing. Replaces gradients_pairs.py and
gradients_inputs.py where heads share nothing, are 33 to 64 wide and in bfloat16: the tiles of a head then fit into one
program and no loop over V remains. (Over 32: with narrower tiles beside those of [C, C] ptxas 12.8 mixes up addresses;
see config.tile_width.) dK_read = dU S^T and dK_kept = rev (V' dS^T) are products of tensors in memory, and the row
factors are applied afterwards:

    dQ = scale gamma (dO S^T) + Z K;   dK = -beta gamma (dW S^T) + rev (V' dS^T) + Z^T Q + (E + E^T) K

so that rowsum(k dK_read) and rowsum(k dK_kept) for dG come from the same products. Z and E go through memory (the
cache): their transposes are required, and Triton miscompiles products with a transposed accumulator. With heads of 128
the same registers hold half as much of a tile, and the spills cost more than the single kernel saves.

GROUPS: queries read the state before their group of 32 tokens (../group_rule/gradients_queries.py). P is not in memory
then: Q K^T is one more product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.gradients_raw import raw_gradient, store_gate_gradient
from deltanet_kernels.gated_delta_rule.row_factors import (
    decay_to,
    gamma_of,
    load_G,
    load_G_before,
    middle_decays,
    output_factors,
    row_after,
    row_factors,
    state_factors,
)


@triton.jit
def _row(factors, at, i, live, j: tl.constexpr, FULL: tl.constexpr):
    """Row factor j (scores.py) of a chunk's tokens."""
    return load_tile(factors + (4 * at + j) + 4 * i, live, FULL)


@triton.jit(do_not_specialize=["T"])
def joint_gradients_kernel(
    q, k, v, factors, P, do, h, dh, vn, dw, Z, E, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, gate_sums,
    cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    v_row, v_token: tl.constexpr, v_head, FORM: tl.constexpr,
):  # fmt: skip
    """Compute dQ, dK, dV, dbeta and dg; one program per (chunk, head)."""
    H: tl.constexpr = FORM.H
    K: tl.constexpr = FORM.K
    V: tl.constexpr = FORM.V
    C: tl.constexpr = FORM.C
    VARLEN: tl.constexpr = FORM.VARLEN
    FULL: tl.constexpr = FORM.FULL
    READ: tl.constexpr = FORM.READ
    UNDECAYED: tl.constexpr = FORM.UNDECAYED
    NORM: tl.constexpr = FORM.NORM
    GROUPS: tl.constexpr = FORM.GROUPS
    PRECISION: tl.constexpr = FORM.PRECISION
    pid = tl.program_id(0)
    head = pid % H
    c = pid // H
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, FORM.BK)
    e = tl.arange(0, FORM.BV)
    live = i < valid
    mK = live[:, None] & (d < K)[None, :]
    mV = live[:, None] & (e < V)[None, :]
    mS = (e < V)[:, None] & (d < K)[None, :]
    strict = i[:, None] > i[None, :]
    square = (c.to(tl.int64) * H + head) * (C * C) + (i[:, None] * C + i[None, :])
    plane = tl.full([], H, tl.int64) * tokens
    dtype = k.dtype.element_ty
    at_row = head.to(tl.int64) * tokens + flat
    of_state = state_factors(factors, plane)
    of_output = output_factors(factors, plane)
    k_at = k + row * k_row + head.to(tl.int64) * k_head + first * k_token + (i[:, None] * k_token + d[None, :])
    q_at = q + row * q_row + head.to(tl.int64) * q_head + first * q_token + (i[:, None] * q_token + d[None, :])
    o_at = do + row * o_row + head.to(tl.int64) * o_head + first * o_token + (i[:, None] * o_token + e[None, :])
    value_at = (flat * H + head) * V + (i[:, None] * (H * V) + e[None, :])
    state_at = (c.to(tl.int64) * H + head) * (K * V) + (e[:, None] * K + d[None, :])

    # Loads stand before the products that they are combined with elementwise: Triton takes the layout of the later one.
    do_tile = load_tile(o_at, mV, FULL)
    vn_tile = load_tile(vn + value_at, mV, FULL)
    dw_tile = load_tile(dw + value_at, mV, FULL)
    if not GROUPS:
        P_tile = tl.load(P + square)
    k_tile = load_tile(k_at, mK, FULL)
    b_i, _, _, r_i = row_factors(of_state, at_row, i, live, FULL)
    G_i, s_i, fade = load_G(factors + at_row, plane, i, valid, FULL, PRECISION)
    f_i = _row(of_output, at_row, i, live, 0, FULL)
    store_tile(dv + value_at, b_i[:, None] * dw_tile.to(tl.float32), mV, FULL)
    dP = tl.dot(do_tile, tl.trans(vn_tile), input_precision=PRECISION)
    if READ:
        dL = tl.dot(dw_tile, tl.trans(vn_tile), input_precision=PRECISION)
        KK = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
    else:
        db = tl.sum(dw_tile.to(tl.float32) * vn_tile.to(tl.float32), axis=1)
    S = load_tile(h + state_at, mS, FULL)
    if GROUPS:
        until, _, _ = middle_decays(factors + at_row, plane, i, valid, FULL)
        late = tl.where(i >= 32, _row(of_output, at_row, i, live, 2, FULL), 0.0)
        dP *= late[:, None] * (until * r_i)[None, :]
        tl.store(Z + square, dP.to(dtype))
        Y = dP * tl.dot(load_tile(q_at, mK, FULL), tl.trans(k_tile), input_precision=PRECISION)
        # Token 31 has no gate until the boundary; left out, it cannot blur a small gradient.
        Y = tl.where(i[None, :] < 31, Y, 0.0)
        dG_seen = tl.where(i == 31, tl.sum(Y), -tl.sum(Y, axis=0))
        Y = tl.zeros_like(Y)
    else:
        Y = tl.where(strict, dP * P_tile.to(tl.float32), 0.0)
    D = tl.where(s_i[:, None] == s_i[None, :], tl.exp(-tl.abs(G_i[:, None] - G_i[None, :])), 0.0) * r_i[None, :]
    if not GROUPS:
        tl.store(Z + square, tl.where(i[:, None] >= i[None, :], dP * D * (f_i * scale)[:, None], 0.0).to(dtype))
    if READ:
        db = tl.sum(tl.where(i[:, None] == i[None, :], dL, 0.0), axis=1)
        if UNDECAYED:
            G_before, s_before = load_G_before(factors + at_row, plane, i, valid, PRECISION)
            D = decay_to(G_before, s_before, G_i, s_i, strict) * r_i[None, :]
        dL = tl.where(strict, dL * D, 0.0) * r_i[:, None]
        tl.store(E + square, (dL * -b_i[:, None]).to(dtype))
        X = dL * KK
        X_row = tl.sum(X, axis=1)
        if not UNDECAYED:
            Y -= X * b_i[:, None]
    dG_pairs = tl.sum(Y, axis=1) - tl.sum(Y, axis=0)
    if UNDECAYED:
        # Neighbours have no gate between them; left out, they cannot blur a small gradient.
        far = tl.where(i[:, None] > i[None, :] + 1, X * b_i[:, None], 0.0)
        dG_pairs += tl.sum(far, axis=0) - row_after(tl.sum(far, axis=1), i)

    q_tile = load_tile(q_at, mK, FULL)
    read_i = _row(of_output, at_row, i, live, 1, FULL)
    erase_i = _row(of_state, at_row, i, live, 1, FULL)
    rev_i = _row(of_state, at_row, i, live, 2, FULL)
    if FORM.SIGMOID:
        db = (1.0 - b_i) * db
    else:
        zero_beta = live & (b_i == 0.0)
        db = db / tl.where(b_i == 0.0, 1.0, b_i)
        if tl.sum(zero_beta.to(tl.int32), axis=0) > 0:
            # beta = 0: the same sum without the division, rowsum(dW (V - gamma U - (D K K^T) V')).
            v_at = v + row * v_row + head.to(tl.int64) * v_head + first * v_token
            v_tile = load_tile(v_at + (i[:, None] * v_token + e[None, :]), mV, FULL).to(tl.float32)
            if READ:
                U = tl.dot(k_tile, tl.trans(S), input_precision=PRECISION)
                again = load_tile(dw + value_at, mV, FULL).to(tl.float32)
                gamma_erase = gamma_of(G_i, s_i)
                if UNDECAYED:
                    gamma_erase = gamma_of(G_before, s_before)
                db0 = tl.sum(again * (v_tile - (gamma_erase * r_i)[:, None] * U), axis=1) - X_row
            else:
                db0 = tl.sum(load_tile(dw + value_at, mV, FULL).to(tl.float32) * v_tile, axis=1)
            db = tl.where(zero_beta, db0, db)
    tl.store(dbeta + (flat + i) * H + head, db.to(dbeta.dtype.element_ty), mask=live)

    dQ = tl.dot(do_tile, S, input_precision=PRECISION) * read_i[:, None]
    tl.debug_barrier()  # Z and E are written
    dG_read = tl.sum(q_tile.to(tl.float32) * dQ, axis=1)
    if GROUPS:
        dG_read = tl.where(i == 31, tl.sum(tl.where(i >= 32, dG_read, 0.0), axis=0), 0.0) + dG_seen
    dQ = tl.dot(tl.load(Z + square), k_tile, dQ, input_precision=PRECISION)
    dq_at = dq + (flat * H + head) * K + (i[:, None] * (H * K) + d[None, :])
    store_tile(dq_at, raw_gradient(q_tile, dQ, f_i, NORM), mK, FULL)

    k_again = load_tile(k_at, mK, FULL)
    if READ:
        dK = tl.dot(dw_tile, S, input_precision=PRECISION) * erase_i[:, None]
    # Read from the cache here instead of being kept in registers.
    dS = load_tile(dh + state_at, mS, FULL)
    SdS = tl.sum(load_tile(h + state_at, mS, FULL).to(tl.float32) * dS.to(tl.float32), axis=1)
    kept = tl.dot(load_tile(vn + value_at, mV, FULL), dS, input_precision=PRECISION) * rev_i[:, None]
    Z_tile = tl.load(Z + square)
    if READ:
        E_tile = tl.load(E + square)
    q_again = load_tile(q_at, mK, FULL)
    if READ:
        k_read = tl.sum(k_again.to(tl.float32) * dK, axis=1)
        if UNDECAYED:
            k_read = row_after(k_read, i)
    else:
        k_read = tl.zeros([C], dtype=tl.float32)
    # The last token's own write cancels in dG; leaving it out keeps small gate gradients exact.
    k_kept = tl.where(i == valid - 1, 0.0, tl.sum(k_again.to(tl.float32) * kept, axis=1))
    dG_last = tl.sum(k_kept, axis=0) + fade * tl.sum(SdS, axis=0)
    dG = dG_read + k_read - k_kept + tl.where(i == valid - 1, dG_last, 0.0)
    if READ:
        dK += kept
        dK = tl.dot(E_tile, k_tile, dK, input_precision=PRECISION)
        dK = tl.dot(tl.trans(E_tile), k_tile, dK, input_precision=PRECISION)
    else:
        dK = kept
    dK = tl.dot(tl.trans(Z_tile), q_again, dK, input_precision=PRECISION)
    dk_at = dk + (flat * H + head) * K + (i[:, None] * (H * K) + d[None, :])
    store_tile(dk_at, raw_gradient(k_again, dK, r_i, NORM), mK, FULL)

    # A scan, or sums of both in one dimension, would bring the tiles above into another layout in float32.
    after = (i[:, None] <= i[None, :]) & live[None, :]
    dg_i = tl.sum(tl.where(after, dG_pairs[None, :] + dG[None, :], 0.0), axis=1)
    sums = gate_sums + (c.to(tl.int64) * H + head) * 2
    store_gate_gradient(dg_i, g, A_log, dt_bias, dg, sums, (flat + i) * H + head, head, live, FULL)
