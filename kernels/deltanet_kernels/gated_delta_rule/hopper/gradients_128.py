"""Chunked gated delta rule, backward: all gradients of a chunk and head in one program, for Hopper, in Gluon.

../states_backward.py and ../gradients_64.py have the formulas. For K = V = 128, C = 64, bfloat16, complete chunks:

    first    dL = -(dW V'^T), K K^T:    dV, dbeta, E, and the terms of dG that X contributes
    then     dW S, V' dS^T, <S, dS>:    dK_read, dK_kept, and the terms of dG that they contribute
    last     dP = dO V'^T, dO S^T:      Z, the terms of Y;  dQ = scale gamma (dO S^T) + Z K;
                                        dK = dK_read + dK_kept + (E + E^T) K + Z^T Q

Tiles are copied straight into shared memory in the layout of the tensor cores (128 bytes swizzled), and all operands of
products are read from there: no operand of a product is in registers, and transposes cost nothing. A program starts
the copies of dW, V', K, then S, dS at its beginning, and those of dO, P, Q into the same places as soon as the last
product with dS and dW is done. The 160 KiB of a chunk thus fit into 112, and two programs of four warps share a
multiprocessor, one waiting for memory while the other computes. Results are stored through shared memory too, in rows
of 16 bytes per thread. tiles.py has the layouts and the rule for fences between tensor cores and threads.

GROUPS: queries read the state before their group of 32 tokens, as in ../gradients_inputs.py. P is not in memory then:
Q K^T is one more product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltanet_kernels.gated_delta_rule.hopper.tiles import (
    COLUMNS,
    ROWS,
    SHARED,
    SQUARE,
    TILE,
    WIDE,
    arrived,
    barrier,
    copy,
    softplus,
    tile_at,
    view,
    zeros,
)

WIDE_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])))


@gluon.jit
def _wide(x):
    """Row factors for a [64, 128] tile."""
    return gl.convert_layout(x, WIDE_ROWS, assert_trivial=True)[:, None]


@gluon.jit
def _row_sum(x):
    return gl.convert_layout(gl.sum(x, axis=1), ROWS, assert_trivial=True)


@gluon.jit
def _decay(G, r, tril):
    """D_ij r_j for i >= j, else 0."""
    G_j = gl.convert_layout(G, COLUMNS)
    r_j = gl.convert_layout(r, COLUMNS)
    return gl.where(tril, gl.exp(gl.minimum(G[:, None] - G_j[None, :], 0.0)), 0.0) * r_j[None, :]


@gluon.jit
def _raw_gradient(x, dx, factor, NORM: gl.constexpr):
    """Gradient of the raw rows x, as in ../gradients_raw.py, over unit rows for the same reason."""
    if NORM:
        x = _wide(factor) * x
        dx -= _wide(_row_sum(x * dx)) * x
    return dx


@gluon.jit(do_not_specialize=["T"])
def gradients_128_kernel(
    q, k, v, factors, P, do, h, dh, vn, dw, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, gate_sums, scale, T, tokens,
    q_row, q_token: gl.constexpr, q_head, k_row, k_token: gl.constexpr, k_head, o_row, o_token: gl.constexpr, o_head,
    v_row, v_token: gl.constexpr, v_head,
    H: gl.constexpr, HV: gl.constexpr, NORM: gl.constexpr, GATE: gl.constexpr, SIGMOID: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK, dV, dbeta and dg; one program per (chunk, value head)."""
    bf16: gl.constexpr = gl.bfloat16
    f32: gl.constexpr = gl.float32
    pid = gl.program_id(0)
    head = pid % HV
    c = pid // HV
    key_head = (head // (HV // H)).to(gl.int64)
    row = (c // (T // 64)).to(gl.int64)
    first = (c % (T // 64)).to(gl.int64) * 64
    flat = row * T + first
    own = (flat * HV + head) * 128
    square = (c.to(gl.int64) * HV + head) * (64 * 64)

    dw_s = gl.allocate_shared_memory(bf16, [64, 128], SHARED)
    vn_s = gl.allocate_shared_memory(bf16, [64, 128], SHARED)
    k_s = gl.allocate_shared_memory(bf16, [64, 128], SHARED)
    S_s = gl.allocate_shared_memory(bf16, [128, 128], SHARED)
    dS_s = gl.allocate_shared_memory(bf16, [128, 128], SHARED)
    copy(dw_s, tile_at(dw + own, HV * 128, 64, 128))
    copy(vn_s, tile_at(vn + own, HV * 128, 64, 128))
    copy(k_s, tile_at(k + (row * k_row + key_head * k_head + first * k_token), k_token, 64, 128))
    async_copy.commit_group()
    copy(S_s, tile_at(h + 4 * square, 128, 128, 128))
    copy(dS_s, tile_at(dh + 4 * square, 128, 128, 128))
    async_copy.commit_group()

    plane = gl.to_tensor(HV).to(gl.int64) * tokens
    at_row = head.to(gl.int64) * tokens + flat
    of_state = factors + (2 * plane + 4 * at_row)
    of_output = factors + (6 * plane + 4 * at_row)
    i = gl.arange(0, 64, layout=ROWS)
    j = gl.arange(0, 64, layout=COLUMNS)
    tril = i[:, None] >= j[None, :]
    strict = i[:, None] > j[None, :]
    diagonal = i[:, None] == j[None, :]
    b_i = gl.load(of_state + 4 * i)
    erase_i = gl.load(of_state + 4 * i + 1)
    rev_i = gl.load(of_state + 4 * i + 2)
    r_i = gl.load(of_state + 4 * i + 3)
    G_i = gl.load(factors + at_row + i)
    s_i = gl.load(factors + at_row + plane + i)
    G_last = gl.load(factors + at_row + 63)
    s_last = gl.load(factors + at_row + plane + 63)
    fade = gl.where(s_last > 0.0, 0.0, gl.exp(G_last))
    gamma_i = gl.where(s_i > 0.0, 0.0, gl.exp(G_i))
    G_i -= 128.0 * s_i

    arrived(1)
    dL = warpgroup_mma(dw_s, vn_s.permute((1, 0)), zeros(64), use_acc=False, is_async=True)
    KK = warpgroup_mma(k_s, k_s.permute((1, 0)), zeros(64), use_acc=False, is_async=True)
    b_t = gl.load(of_state + 4 * gl.arange(0, 64, layout=gl.SliceLayout(1, TILE)))
    dV = (b_t[:, None] * dw_s.load(TILE).to(f32)).to(bf16)
    gl.store(tile_at(dv + own, HV * 128, 64, 128), dV)
    dL, KK = warpgroup_mma_wait(0, deps=(dL, KK))
    decay = _decay(G_i, r_i, tril)
    db = gl.sum(gl.where(diagonal, dL, 0.0), axis=1)
    dL = gl.where(strict, dL * decay, 0.0) * r_i[:, None]
    E = (dL * -b_i[:, None]).to(bf16)
    X = dL * KK
    X_row = gl.sum(X, axis=1)
    dG_col = gl.sum(X * b_i[:, None], axis=0)
    dG_row = -b_i * X_row + gl.convert_layout(dG_col, ROWS)

    arrived(0)
    if SIGMOID:
        db = (1.0 - b_i) * db
    else:
        zero_beta = b_i == 0.0
        db = db / gl.where(zero_beta, 1.0, b_i)
        if gl.sum(zero_beta.to(gl.int32), axis=0) > 0:
            # beta = 0: the same sum without the division, rowsum(dW (V - gamma U - (D K K^T) V')).
            U = warpgroup_mma(k_s, S_s.permute((1, 0)), zeros(128), use_acc=False, is_async=True)
            wide_i = gl.arange(0, 64, layout=WIDE_ROWS)[:, None]
            wide_e = gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
            v_at = v + (row * v_row + head.to(gl.int64) * v_head + first * v_token)
            v_tile = gl.load(v_at + (wide_i * v_token + wide_e)).to(f32)
            U = warpgroup_mma_wait(0, deps=(U,))
            db0 = _row_sum(dw_s.load(WIDE).to(f32) * (v_tile - _wide(gamma_i * r_i) * U)) - X_row
            db = gl.where(zero_beta, db0, db)
    gl.store(dbeta + (flat + i) * HV + head, db.to(dbeta.dtype.element_ty))

    SdS = gl.zeros([16, 128], f32, TILE)
    for part in gl.static_range(8):
        S_part = S_s.slice(part * 16, 16).load(TILE).to(f32)
        SdS += S_part * dS_s.slice(part * 16, 16).load(TILE).to(f32)
    SdS = gl.sum(gl.sum(SdS, axis=1), axis=0)
    dK = warpgroup_mma(dw_s, S_s, zeros(128), use_acc=False, is_async=True)
    kept = warpgroup_mma(vn_s, dS_s, zeros(128), use_acc=False, is_async=True)
    dK, kept = warpgroup_mma_wait(0, deps=(dK, kept))
    barrier()
    late = view(dS_s, bf16, [2, 64, 128], SHARED)
    do_s = late.index(0)
    q_s = late.index(1)
    squares = view(dw_s, bf16, [2, 64, 64], SHARED)
    P_s = squares.index(0)
    E_s = squares.index(1)
    copy(do_s, tile_at(do + (row * o_row + head.to(gl.int64) * o_head + first * o_token), o_token, 64, 128))
    if not GROUPS:
        copy(P_s, tile_at(P + square, 64, 64, 64))
    copy(q_s, tile_at(q + (row * q_row + key_head * q_head + first * q_token), q_token, 64, 128))
    async_copy.commit_group()
    E_s.store(E)
    k_tile = k_s.load(WIDE).to(f32)
    dK *= _wide(erase_i)
    dG_row += _row_sum(k_tile * dK)
    kept *= _wide(rev_i)
    k_kept = _row_sum(k_tile * kept)
    dK += kept
    # The last token's own write cancels in dG; leaving it out keeps small gate gradients exact.
    k_kept = gl.where(i == 63, 0.0, k_kept)
    dG_last = gl.sum(k_kept, axis=0) + fade * SdS
    dG_row += gl.where(i == 63, dG_last, -k_kept)
    # Read once more instead of being kept in registers.
    f_i = gl.load(of_output + 4 * i)
    read_i = gl.load(of_output + 4 * i + 1)

    arrived(0)
    dP = warpgroup_mma(do_s, vn_s.permute((1, 0)), zeros(64), use_acc=False, is_async=True)
    dQ = warpgroup_mma(do_s, S_s, zeros(128), use_acc=False, is_async=True)
    Z_s = P_s
    if GROUPS:
        QK = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros(64), use_acc=False, is_async=True)
        G_middle = gl.load(factors + at_row + 31) - 128.0 * gl.load(factors + at_row + plane + 31)
        early = gl.where(i < 32, gl.exp(gl.minimum(G_middle - G_i, 0.0)) * r_i, 0.0)
        late = gl.where(i >= 32, gl.load(of_output + 4 * i + 2), 0.0)
        dP = warpgroup_mma_wait(2, deps=(dP,))
        Z = dP * late[:, None] * gl.convert_layout(early, COLUMNS)[None, :]
        Z_s.store(Z.to(bf16))
        dQ, QK = warpgroup_mma_wait(0, deps=(dQ, QK))
        # Token 31 has no gate until the boundary; left out, it cannot blur a small gradient.
        Y = gl.where(j[None, :] < 31, Z * QK, 0.0)
        dG_row -= gl.convert_layout(gl.sum(Y, axis=0), ROWS)
        Y_row = gl.sum(Y, axis=1)
    else:
        P_tile = P_s.load(SQUARE).to(f32)
        dP = warpgroup_mma_wait(1, deps=(dP,))
        Y = gl.where(strict, dP * P_tile, 0.0)
        dG_row += gl.sum(Y, axis=1)
        dG_row -= gl.convert_layout(gl.sum(Y, axis=0), ROWS)
        decay = _decay(G_i, r_i, tril)
        Z_s.store((dP * decay * (f_i * scale)[:, None]).to(bf16))
        dQ = warpgroup_mma_wait(0, deps=(dQ,))
    fence_async_shared()
    barrier()
    dQ *= _wide(read_i)
    q_tile = q_s.load(WIDE).to(f32)
    if GROUPS:
        second = gl.where(i >= 32, Y_row + _row_sum(q_tile * dQ), 0.0)
        dG_row += gl.where(i == 31, gl.sum(second, axis=0), 0.0)
    else:
        dG_row += _row_sum(q_tile * dQ)
    dQ = warpgroup_mma(Z_s, k_s, dQ, is_async=True)
    dK = warpgroup_mma(E_s, k_s, dK, is_async=True)
    dK = warpgroup_mma(E_s.permute((1, 0)), k_s, dK, is_async=True)
    dK = warpgroup_mma(Z_s.permute((1, 0)), q_s, dK, is_async=True)
    dQ = warpgroup_mma_wait(3, deps=(dQ,))
    do_s.store(_raw_gradient(q_tile, dQ, f_i, NORM).to(bf16))
    gl.store(tile_at(dq + own, HV * 128, 64, 128), do_s.load(TILE))
    dK = warpgroup_mma_wait(0, deps=(dK,))
    vn_s.store(_raw_gradient(k_s.load(WIDE).to(f32), dK, r_i, NORM).to(bf16))
    gl.store(tile_at(dk + own, HV * 128, 64, 128), vn_s.load(TILE))

    dG = gl.convert_layout(dG_row, COLUMNS)
    dg_i = gl.sum(gl.where(i[:, None] <= j[None, :], dG[None, :], 0.0), axis=1)
    gates = (flat + i) * HV + head
    if GATE:
        a = gl.load(g + gates).to(f32) + gl.load(dt_bias + head).to(f32)
        rate = gl.exp(gl.load(A_log + head).to(f32))
        positive = softplus(a)
        sums = gate_sums + (c.to(gl.int64) * HV + head) * 2
        gl.store(sums, gl.sum(-rate * positive * dg_i, axis=0))
        dg_i = -rate / (1.0 + gl.exp(-a)) * dg_i
        gl.store(sums + 1, gl.sum(dg_i, axis=0))
    gl.store(dg + gates, dg_i.to(dg.dtype.element_ty))
    dw_s._keep_alive()
    vn_s._keep_alive()
    k_s._keep_alive()
    S_s._keep_alive()
    dS_s._keep_alive()
