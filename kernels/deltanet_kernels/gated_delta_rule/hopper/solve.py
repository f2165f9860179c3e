"""Chunked gated delta rule, the stages before the states in one kernel, for Hopper, in Gluon.

Row factors, P, T and the bounds of scores.py and solve.py, in the same layouts, for K = 64 or 128, C = 64, bfloat16,
complete chunks, and as many query heads as key heads. L stays in the multiprocessor, and one program serves all value
heads of a key head, so Q K^T and K K^T are computed once.

    D_ij r_j = 2^{x_i - (x_j - log2 r_j)}, x = log2(e) (G - 128 s):  one exponential per entry, for P and for L;
    T in three steps, with b = -L, Y = T^T, and T_a the inverse of a diagonal block:
        8      each column of T_a by substitution, all columns of a chunk in parallel, in float32
        16     T_lower = T_a b T_a' for the two blocks on the diagonal
        64     by block rows of 16:  Y_a = E_a T_a^T + (sum_{c < a} Y_c b_ac^T) T_a^T

Every intermediate is an entry of an inverse or L times one, as in ../solve.py; products of the steps 16 and 64 are
tf32, as there. They are transposed, so that the result of one product is the left factor of the next in the register
layout that it already has: a warp holds 16 columns of T from the first block to the last and waits for no other warp.
In an accumulator a thread holds columns 2t and 2t + 1, in a factor columns t and t + 4, so both factors of a product
permute their inner index (`_inner`).

Four programs of four warps run per multiprocessor, three where value heads share the products. The limit is the
bandwidth of shared memory, through which all data passes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from deltanet_kernels.common.tiles import L2_EPS
from deltanet_kernels.gated_delta_rule.hopper.tiles import (
    COLUMNS,
    NARROW,
    ROWS,
    SHARED,
    SQUARE,
    arrived,
    barrier,
    copy,
    softplus,
    tile_at,
    view,
    zeros,
)

EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one row per thread
ALL = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # 64 rows in every warp
QUADS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
SOLVE = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 8, 1], [4, 1, 1], [2, 1, 0]))  # one column of a block per thread
STRIP = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 1))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 1))
RIGHT_PAIRS = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))  # one diagonal block per warp
BLOCK_LEFT = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2))
BLOCK_RIGHT = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]), 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
LONG = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # rows of 64 float32
SHORT = gl.constexpr(gl.SwizzledSharedLayout(4, 4, 2, [1, 0]))  # rows of 8


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _square_sums(tile, K: gl.constexpr):
    """|x|^2 of each row, reading two numbers per word."""
    words = view(tile, gl.int32, [64, K // 2], gl.NVMMASharedLayout(128, 32, 2))
    x = words.load(gl.BlockedLayout([1, K // 4], [16, 2], [4, 1], [0, 1]))
    even = (x << 16).to(gl.float32, bitcast=True)
    odd = (x & -65536).to(gl.float32, bitcast=True)
    return gl.sum(even * even, axis=1) + gl.sum(odd * odd, axis=1)


@gluon.jit
def _load_gates(g, beta, at):
    """Load gates into the first 64 threads and write strengths into the others."""
    n = gl.arange(0, 128, layout=EACH)
    x = gl.load(g + at, mask=n < 64, other=0.0).to(gl.float32)
    return x, gl.load(beta + at, mask=n >= 64, other=0.0).to(gl.float32)


@gluon.jit
def _sum_gates(x, b, head, A_log, dt_bias, gates_s, sums_s, GATE: gl.constexpr, SIGMOID: gl.constexpr):
    """Store G and s in sums_s, and beta in the second row of gates_s."""
    if GATE:
        x = softplus(x + gl.load(dt_bias + head).to(gl.float32))
        x = -gl.exp(gl.load(A_log + head).to(gl.float32)) * x
    if SIGMOID:
        b = 1.0 / (1.0 + gl.exp(-b))
    view(gates_s, gl.float32, [128], VECTOR).store(gl.where(gl.arange(0, 128, layout=EACH) < 64, x, b))
    x = gates_s.index(0).load(ALL)
    sums_s.index(0).store(gl.associative_scan(gl.where(x >= -100.0, x, 0.0), 0, _add))
    sums_s.index(1).store(gl.associative_scan(gl.where(x < -100.0, 1.0, 0.0), 0, _add))


@gluon.jit
def _store_quads(at, x0, x1, x2, x3):
    """Store four factors per row side by side."""
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, QUADS))[None, :]
    quad += 4 * gl.arange(0, 64, layout=gl.SliceLayout(1, QUADS))[:, None]
    x = gl.reshape(gl.join(gl.join(x0, x2), gl.join(x1, x3)), [64, 4])
    gl.store(at + quad, gl.convert_layout(x, QUADS, assert_trivial=True))


@gluon.jit
def _diagonal(x):
    """The 16 x 16 blocks on the diagonal of a [64, 64] tile, one below the other: [64, 16], one block per warp."""
    even, odd = gl.split(gl.permute(gl.reshape(x, [64, 2, 2, 16]), (0, 3, 1, 2)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    x0 = gl.convert_layout(x0, STRIP, assert_trivial=True)
    x1 = gl.convert_layout(x1, STRIP, assert_trivial=True)
    x2 = gl.convert_layout(x2, STRIP, assert_trivial=True)
    x3 = gl.convert_layout(x3, STRIP, assert_trivial=True)
    warp = (gl.arange(0, 64, layout=gl.SliceLayout(1, STRIP)) // 16)[:, None]
    return gl.where(warp < 2, gl.where(warp == 0, x0, x1), gl.where(warp == 2, x2, x3))


@gluon.jit
def _inner(x, y):
    """x [64, 16] and y [16, 16], loaded in pairs of columns, as the factors of a product (see above)."""
    x = gl.reshape(gl.permute(gl.reshape(x, [64, 2, 4, 2]), (0, 1, 3, 2)), [64, 16])
    y = gl.reshape(gl.permute(gl.reshape(y, [2, 4, 2, 16]), (0, 2, 1, 3)), [16, 16])
    return gl.convert_layout(x, LEFT), gl.convert_layout(y, RIGHT)


@gluon.jit
def _times(x, tile, z):
    """Return x tile^T + z."""
    x, y = _inner(x, tile.permute((1, 0)).load(RIGHT_PAIRS))
    return mma_v2(x, y, z, input_precision="tf32")


@gluon.jit
def _beside(x, y, layout: gl.constexpr):
    """Join two tiles [4, 16, 8] along the columns: [4, 16, 16]."""
    x = gl.reshape(gl.permute(gl.join(x, y), (0, 1, 3, 2)), [4, 16, 16])
    return gl.convert_layout(x, layout)


@gluon.jit
def _invert_blocks(b, solve_s, lower_s, small_s):
    """(I - b)^{-1} of the four blocks on the diagonal of b [64, 64], each transposed: [64, 16]."""
    left, right = gl.split(gl.permute(gl.reshape(_diagonal(b), [4, 2, 8, 2, 8]), (0, 2, 4, 1, 3)))
    first, lower = gl.split(left)
    _, second = gl.split(right)
    solve_s.permute((0, 3, 2, 1)).store(gl.join(first, second))
    lower_s.slice(0, 8, 2).store(lower)
    columns_s = view(solve_s, gl.float32, [8, 8, 8], CUBE)
    j = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, SOLVE)))[None, :, None]
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, SOLVE)))[None, None, :]
    X = gl.where(i == j, 1.0, 0.0) + gl.zeros([8, 8, 8], gl.float32, SOLVE)
    for n in gl.static_range(7):
        x = gl.sum(gl.where(i == n, X, 0.0), axis=2)  # one register: every other term is known to be 0
        X = gl.where(i > n, X + columns_s.slice(n, 1, 1).load(SOLVE) * x[:, :, None], X)
    small_s.store(gl.reshape(X, [64, 8]))
    small = small_s.reshape([4, 16, 8])
    Y = small.load(BLOCK)
    n = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, BLOCK_RIGHT)))[None, :, None]
    none = gl.zeros([4, 16, 8], gl.float32, BLOCK)
    left = gl.where(n < 8, Y, 0.0)
    lower = gl.where(k < 8, lower_s.permute((0, 2, 1)).load(BLOCK_RIGHT), 0.0)
    X = mma_v2(_beside(left, none, BLOCK_LEFT), lower, none, input_precision="tf32")
    right = gl.where(n >= 8, Y, 0.0)
    right = mma_v2(_beside(none, X, BLOCK_LEFT), small.load(BLOCK_RIGHT), right, input_precision="tf32")
    return gl.convert_layout(gl.reshape(_beside(left, right, BLOCK), [64, 16]), STRIP, assert_trivial=True)


@gluon.jit
def _invert(inverse, b_s, blocks_s):
    """T^T from the inverses of the diagonal blocks, transposed, and b [64, 64]."""
    warp = (gl.arange(0, 64, layout=gl.SliceLayout(1, STRIP)) // 16)[:, None]
    none = gl.zeros([64, 16], gl.float32, STRIP)
    blocks_s.permute((1, 0)).store(inverse)
    Y0 = gl.where(warp == 0, inverse, 0.0)
    X = _times(Y0, b_s.slice(16, 16).slice(0, 16, 1), none)
    Y1 = _times(X, blocks_s.slice(16, 16, 1), gl.where(warp == 1, inverse, 0.0))
    X = _times(Y0, b_s.slice(32, 16).slice(0, 16, 1), none)
    X = _times(Y1, b_s.slice(32, 16).slice(16, 16, 1), X)
    Y2 = _times(X, blocks_s.slice(32, 16, 1), gl.where(warp == 2, inverse, 0.0))
    X = _times(Y0, b_s.slice(48, 16).slice(0, 16, 1), none)
    X = _times(Y1, b_s.slice(48, 16).slice(16, 16, 1), X)
    X = _times(Y2, b_s.slice(48, 16).slice(32, 16, 1), X)
    Y3 = _times(X, blocks_s.slice(48, 16, 1), gl.where(warp == 3, inverse, 0.0))
    Y = gl.permute(gl.join(gl.join(Y0, Y2), gl.join(Y1, Y3)), (0, 2, 3, 1))
    return gl.convert_layout(gl.reshape(Y, [64, 64]), STRIP, assert_trivial=True)


@gluon.jit(do_not_specialize=["T"])
def scores_and_inverse_kernel(
    q, k, g, beta, A_log, dt_bias, factors, P_out, T_out, bounds, scale, T, tokens,
    q_row, q_token: gl.constexpr, q_head, k_row, k_token: gl.constexpr, k_head,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, NORM: gl.constexpr, GATE: gl.constexpr,
    SIGMOID: gl.constexpr, BOUND: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Compute P, T, row factors and bound for the value heads of a key head; one program per (chunk, key head).

    Without SCORES q is not read, and P and the factors of the outputs are not written.
    """
    bf16: gl.constexpr = gl.bfloat16
    f32: gl.constexpr = gl.float32
    SHARE: gl.constexpr = HV // H
    pid = gl.program_id(0)
    key_head = pid % H
    first_head = key_head * SHARE
    c = pid // H
    row = (c // (T // 64)).to(gl.int64)
    first = (c % (T // 64)).to(gl.int64) * 64
    flat = row * T + first

    q_s = gl.allocate_shared_memory(bf16, [64, K], SHARED)
    k_s = gl.allocate_shared_memory(bf16, [64, K], SHARED)
    if SCORES:
        copy(q_s, tile_at(q + (row * q_row + key_head.to(gl.int64) * q_head + first * q_token), q_token, 64, K))
    copy(k_s, tile_at(k + (row * k_row + key_head.to(gl.int64) * k_head + first * k_token), k_token, 64, K))
    async_copy.commit_group()
    # One allocation each: Triton separates accesses to the same allocation by barriers.
    gates_s = gl.allocate_shared_memory(f32, [2, 64], VECTOR)
    sums_s = gl.allocate_shared_memory(f32, [2, 64], VECTOR)
    qq_s = gl.allocate_shared_memory(f32, [64], VECTOR)
    kk_s = gl.allocate_shared_memory(f32, [64], VECTOR)
    x_i_s = gl.allocate_shared_memory(f32, [64], VECTOR)
    x_j_s = gl.allocate_shared_memory(f32, [64], VECTOR)
    read_s = gl.allocate_shared_memory(f32, [64], VECTOR)
    write_s = gl.allocate_shared_memory(f32, [64], VECTOR)
    lower_s = gl.allocate_shared_memory(f32, [4, 8, 16], CUBE)
    small_s = gl.allocate_shared_memory(f32, [64, 8], SHORT)
    blocks_s = gl.allocate_shared_memory(f32, [16, 64], LONG)
    gates = (flat + gl.arange(0, 128, layout=EACH) % 64) * HV + first_head
    x, b = _load_gates(g, beta, gates)
    _sum_gates(x, b, first_head, A_log, dt_bias, gates_s, sums_s, GATE, SIGMOID)

    arrived(0)
    if NORM and SCORES:
        qq_s.store(_square_sums(q_s, K))
    if SCORES:
        QK = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros(64), use_acc=False, is_async=True)
    KK = warpgroup_mma(k_s, k_s.permute((1, 0)), zeros(64), use_acc=False, is_async=True)
    if SCORES:
        QK, KK = warpgroup_mma_wait(0, deps=(QK, KK))
    else:
        KK = warpgroup_mma_wait(0, deps=(KK,))
    if NORM or BOUND:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, STRIP))[:, None]
        j = gl.arange(0, 16, layout=gl.SliceLayout(0, STRIP))[None, :]
        kk_s.store(gl.sum(gl.where(i % 16 == j, _diagonal(KK), 0.0), axis=1))
    barrier()
    cubes: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    b_s = view(k_s, f32, [64, 64], LONG) if K == 128 else gl.allocate_shared_memory(f32, [64, 64], LONG)
    if K == 64:
        P_s = q_s
        solve_s = view(k_s, f32, [4, 4, 2, 8, 8], cubes).index(0)
    elif SHARE == 1:
        P_s = view(q_s, bf16, [2, 64, 64], SHARED).index(0)
        solve_s = view(q_s, f32, [8, 4, 2, 8, 8], cubes).index(4)
    else:
        P_s = gl.allocate_shared_memory(bf16, [64, 64], SHARED)
        solve_s = gl.allocate_shared_memory(f32, [4, 2, 8, 8], cubes)
    if SHARE > 1 and SCORES:
        QK_s = view(q_s, f32, [64, 64], LONG) if K == 128 else gl.allocate_shared_memory(f32, [64, 64], LONG)
        QK_s.store(QK)

    each = gl.arange(0, 64, layout=EACH)
    i = gl.arange(0, 64, layout=ROWS)
    j = gl.arange(0, 64, layout=COLUMNS)
    causal = i[:, None] >= j[None, :]
    plane = gl.to_tensor(HV).to(gl.int64) * tokens
    none = gl.zeros([64], f32, EACH)
    f = none + 1.0
    r = none + 1.0
    if NORM or BOUND:
        kk = kk_s.load(EACH)
    if NORM:
        if SCORES:
            f = gl.rsqrt(qq_s.load(EACH) + L2_EPS)
        r = gl.rsqrt(kk + L2_EPS)

    for share in range(SHARE):
        head = first_head + share
        if SHARE > 1:
            x, b = _load_gates(g, beta, gates + (share + 1) % SHARE)
        G = sums_s.index(0).load(EACH)
        s = sums_s.index(1).load(EACH)
        beta_i = gates_s.index(1).load(EACH)
        G_last = sums_s.index(0).slice(63, 1).load(EACH)
        s_last = sums_s.index(1).slice(63, 1).load(EACH)
        gamma = gl.where(s > 0.0, 0.0, gl.exp(G))
        rev = gl.where(s == s_last, gl.exp(gl.minimum(G_last - G, 0.0)), 0.0)
        at = head.to(gl.int64) * tokens + flat
        gl.store(factors + at + each, G)
        gl.store(factors + plane + at + each, s)
        _store_quads(factors + (2 * plane + 4 * at), beta_i, -gamma * beta_i * r, rev * r, r)
        if SCORES:
            _store_quads(factors + (6 * plane + 4 * at), f, f * scale * gamma, none, none)
        if BOUND:
            longer = gl.log(gl.abs(1.0 - beta_i * r * r * kk))
            bound = gl.sum(G_last, axis=0) + gl.sum(gl.where(longer <= 0.0, 0.0, longer), axis=0)
            bound = gl.where(gl.sum(s_last, axis=0) > 0.0, -float("inf"), bound)
            gl.store(bounds + c.to(gl.int64) * HV + head, bound)
        x_i = (G - 128.0 * s) * 1.4426950408889634
        x_i_s.store(x_i)
        x_j_s.store(x_i - gl.log2(r))
        read_s.store(f * scale)
        write_s.store(-beta_i * r)
        D = gl.exp2(x_i_s.load(ROWS)[:, None] - x_j_s.load(COLUMNS)[None, :])
        if SCORES:
            if SHARE > 1:
                QK = QK_s.load(SQUARE)
            P_s.store((QK * gl.where(causal, D, 0.0) * read_s.load(ROWS)[:, None]).to(bf16))
        # The entries on and above the diagonal are undefined; nothing reads them.
        negative = KK * D * write_s.load(ROWS)[:, None]
        b_s.store(negative)
        inverse = _invert_blocks(negative, solve_s, lower_s, small_s)
        square = (c.to(gl.int64) * HV + head) * (64 * 64)
        if SCORES:
            gl.store(tile_at(P_out + square, 64, 64, 64), P_s.load(NARROW))
        P_s.permute((1, 0)).store(_invert(inverse, b_s, blocks_s).to(bf16))
        gl.store(tile_at(T_out + square, 64, 64, 64), P_s.load(NARROW))
        if share + 1 < SHARE:
            _sum_gates(x, b, head + 1, A_log, dt_bias, gates_s, sums_s, GATE, SIGMOID)
    q_s._keep_alive()
    k_s._keep_alive()
