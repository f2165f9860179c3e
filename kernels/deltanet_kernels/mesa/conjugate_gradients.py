"""The linear systems of the Mesa layer on CUDA: all steps of conjugate gradients of a chunk on chip.

solve.py has the equations and the rules of stopping. A program has the matrix H before its chunk, the chunk's keys and
the decayed weights w_ts = beta_s D_ts with D_ts = e^{G_t - G_s}, and solves for the tokens of one output head until all
of them are solved or `steps` are done. Forward the right sides are the queries, and it also writes what the outputs and
their gradients need,

    P = D * (X K^T)        O = scale (e^G (X S) + P (beta V))

Backward they are the gradients of the solutions,

    dX = scale (e^G (dO S^T) + (w * (dO V^T)) K)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import decay_between, gamma_of, load_G, row_factors, state_factors

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
FLOOR = tl.constexpr((4.0 * 2.0**-23) ** 2)  # a row is solved at this part of its squared right side


@triton.jit
def _times(x, H, keys, w, gamma, lam, PRECISION: tl.constexpr):
    """Each row of x times its matrix."""
    y = tl.dot(x, H, input_precision=PRECISION) * gamma[:, None] + x * lam[None, :]
    inner = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * w
    return tl.dot(inner, keys, y, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "steps"])
def conjugate_gradients_kernel(
    right, k, v, ridge, factors, h, x_out, P, o, cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens, steps,
    r_row, r_token: tl.constexpr, r_head, k_row, k_token: tl.constexpr, k_head, v_row, v_token: tl.constexpr, v_head,
    H: tl.constexpr, HV: tl.constexpr, HR: tl.constexpr, HO: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    FORWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve for the tokens of a chunk; one program per (chunk, output head).

    `right` has HR heads, of K channels forward (the queries) and of V backward (dO). h [chunks, HV, V + K, K] has S^T
    in its first V rows and H in the others.
    """
    pid = tl.program_id(0)
    out = pid % HO
    c = pid // HO
    head = out // (HO // HV)
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    live = i < valid
    mK = live[:, None] & (d < K)[None, :]
    mV = live[:, None] & (e < V)[None, :]
    mS = (e < V)[:, None] & (d < K)[None, :]
    plane = tl.full([], HV, tl.int64) * tokens
    at_row = head.to(tl.int64) * tokens + flat
    G, s, _ = load_G(factors + at_row, plane, i, valid, FULL, PRECISION)
    beta, _, _, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
    gamma = gamma_of(G, s)
    w = decay_between(G, s, i[:, None] >= i[None, :]) * beta[None, :]

    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
    keys = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL).to(tl.float32)
    S_base = h + (c.to(tl.int64) * HV + head) * ((V + K) * K)
    S_at = S_base + (e[:, None] * K + d[None, :])
    v_at = v + row * v_row + head.to(tl.int64) * v_head + first * v_token + (i[:, None] * v_token + e[None, :])
    r_base = right + row * r_row + (out // (HO // HR)).to(tl.int64) * r_head + first * r_token
    if FORWARD:
        b = load_tile(r_base + (i[:, None] * r_token + d[None, :]), mK, FULL).to(tl.float32)
    else:
        do = load_tile(r_base + (i[:, None] * r_token + e[None, :]), mV, FULL).to(tl.float32)
        values = load_tile(v_at, mV, FULL).to(tl.float32)
        b = tl.dot(do, load_tile(S_at, mS, FULL), input_precision=PRECISION) * gamma[:, None]
        inner = tl.dot(do, tl.trans(values), input_precision=PRECISION) * w
        b = tl.dot(inner, keys, b, input_precision=PRECISION) * scale

    H_base = S_base + V * K
    H_at = H_base + (d[:, None] * K + d[None, :])
    H_tile = load_tile(H_at, (d < K)[:, None] & (d < K)[None, :], FULL)
    # Channels past the end get a ridge of 1 instead of 0, which would divide 0 by 0.
    lam = tl.load(ridge + head * K + d, mask=d < K, other=1.0).to(tl.float32)
    on_diagonal = tl.load(H_base + d * (K + 1), mask=d < K, other=0.0)
    diagonal = tl.dot(w, keys * keys, input_precision=PRECISION) + gamma[:, None] * on_diagonal[None, :] + lam[None, :]

    floor = tl.sum(b * b, axis=1) * FLOOR
    x = b / diagonal
    residual = b - _times(x, H_tile, keys, w, gamma, lam, PRECISION)
    direction = residual
    size = tl.sum(residual * residual, axis=1)
    step = steps * 0
    while (step < steps) & (tl.max(tl.where(size > floor, 1, 0), axis=0) > 0):
        image = _times(direction, H_tile, keys, w, gamma, lam, PRECISION)
        going = size > floor
        length = tl.where(going, size / tl.maximum(tl.sum(direction * image, axis=1), TINY), 0.0)
        x += length[:, None] * direction
        residual -= length[:, None] * image
        before = size
        size = tl.sum(residual * residual, axis=1)
        direction = residual + tl.where(going, size / tl.maximum(before, TINY), 0.0)[:, None] * direction
        step += 1
    store_tile(x_out + (flat * HO + out) * K + (i[:, None] * (HO * K) + d[None, :]), x, mK, FULL)

    if FORWARD:
        # The decays once more, instead of a tile that lives through the steps.
        D = decay_between(G, s, i[:, None] >= i[None, :])
        inner = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * D
        tl.store(P + (c.to(tl.int64) * HO + out) * (C * C) + (i[:, None] * C + i[None, :]), inner)
        S_tile = tl.load(S_base + (e[None, :] * K + d[:, None]), mask=(e < V)[None, :] & (d < K)[:, None], other=0.0)
        read = tl.dot(x, S_tile, input_precision=PRECISION) * gamma[:, None]
        values = load_tile(v_at, mV, FULL).to(tl.float32)
        read = tl.dot(inner, beta[:, None] * values, read, input_precision=PRECISION) * scale
        store_tile(o + (flat * HO + out) * V + (i[:, None] * (HO * V) + e[None, :]), read, mV, FULL)
