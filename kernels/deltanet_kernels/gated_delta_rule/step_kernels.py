"""The two kernels of step.py: one token with a slice of the state at a time, several tokens with the complete state.

A program computes one state of one row, with the query heads that read it. It can therefore normalise the outputs and,
because the channels of these heads are its own, update the convolution's tail. The tokens of an input X are X_ROW
elements apart, see `common/rows.py`; KV_REPEATS neighbouring heads read the same channels of k and v.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton does not know starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import L2_EPS, softplus


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _is_real(padding, row, inside, PADDING: tl.constexpr):
    """Whether tokens `row` count: they are in this step (`inside`) and are not padding."""
    real = inside
    if PADDING:
        real = real & (tl.load(padding + row, mask=inside, other=1).to(tl.int32) == 0)
    return real


@triton.jit
def _window(
    x, tail, padding, n, t, T, c, m, first, ROW: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """The W inputs of the convolution at token t for channels c (masked by m) of x, whose tokens are ROW apart.

    Oldest first; without a convolution only the token itself. Channel c of x is channel first + c of the convolution.
    """
    TAPS: tl.constexpr = W if W > 1 else 1
    inputs = ()
    for w in tl.static_range(TAPS):
        # Positions have the shape of c: Triton's interpreter takes no mask that is partly a scalar.
        p = c * 0 + (t - (TAPS - 1) + w)
        new = m & _is_real(padding, n * T + p, p >= 0, PADDING)
        y = tl.load(x + (n * T + p) * ROW + c, mask=new, other=0.0).to(tl.float32)
        if W > 1:
            old = tail + (n * C + first + c) * (W - 1) + (W - 1 + p)
            y += tl.load(old, mask=m & (p < 0), other=0.0).to(tl.float32)
        inputs = inputs + (y,)
    return inputs


@triton.jit
def _channels(
    x, weight, tail, padding, n, t, T, c, m, first, ROW: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Channels c of x at token t, after the convolution if there is one."""
    inputs = _window(x, tail, padding, n, t, T, c, m, first, ROW, C, W, PADDING)
    if W == 0:
        y = inputs[0]
    else:
        y = (c * 0).to(tl.float32)
        for w in tl.static_range(W):
            y += tl.load(weight + (first + c) * W + w, mask=m, other=0.0).to(tl.float32) * inputs[w]
    return y


@triton.jit
def _head(
    x, weight, tail, padding, cos, sin, offset, n, t, T, head, d, m, first, K: tl.constexpr, ROW: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, OFFSET: tl.constexpr,
    SILU: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Head `head` of q or k at token t: convolved, rotated, centred, activated; not normalised yet."""
    y = _channels(x, weight, tail, padding, n, t, T, head * K + d, m, first, ROW, C, W, PADDING)
    if R > 0:
        # The first R channels turn: channel i < R / 2 with channel i + R / 2, whose value is computed again here.
        m_r = m & (d < R)
        other = head * K + tl.where(d < R // 2, d + R // 2, d - R // 2)
        partner = _channels(x, weight, tail, padding, n, t, T, other, m_r, first, ROW, C, W, PADDING)
        at = ((n * T if ROPE_ROWS else n * 0) + t) * R + d
        y = y * tl.load(cos + at, mask=m_r, other=1.0).to(tl.float32)
        y += tl.where(d < R // 2, -partner, partner) * tl.load(sin + at, mask=m_r, other=0.0).to(tl.float32)
    if OFFSET:
        y -= tl.load(offset + head * K + d, mask=m, other=0.0).to(tl.float32)
    if SILU:
        y = _silu(y)
    return y


@triton.jit
def _gates(
    a, b, A_log, dt_bias, row, head, real, A_ROW: tl.constexpr, B_ROW: tl.constexpr, BETA: tl.constexpr,
    DECAY: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """Decay and write strength of state head `head` at token `row`; a padded token does not change the state."""
    if DECAY:
        x = tl.load(a + row * A_ROW + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        y = tl.load(b + row * B_ROW + head).to(tl.float32)
        gamma = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x))
    else:
        gamma = tl.exp(tl.load(a + row * A_ROW + head).to(tl.float32))
        y = tl.load(b + row * B_ROW + head).to(tl.float32)
    gamma = tl.where(real, gamma, 1.0)
    if SIGMOID:
        y = BETA / (1.0 + tl.exp(-y))
    return gamma, tl.where(real, y, 0.0)


@triton.jit
def _delta(v, beta, gamma, read, READ: tl.constexpr, UNDECAYED: tl.constexpr):
    """The value that a token writes into a state of which its key reads `read`."""
    if UNDECAYED:
        delta = beta * (v - read)
    elif READ:
        delta = beta * (v - gamma * read)
    else:
        delta = beta * v
    return delta


@triton.jit
def _move_tail(
    q, k, v, tail, padding, n, T, head, d, md, f, mf, H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Store the last W-1 inputs of state head `head`, which are this program's alone: H = HV, which divides HQ."""
    C: tl.constexpr = (HQ + H) * K + HV * V
    GROUP: tl.constexpr = HQ // HV
    c = head * K + d
    c_v = head * V + f
    q_new = ()
    for m in tl.static_range(GROUP):
        c_q = (head * GROUP + m) * K + d
        q_new = q_new + _window(q, tail, padding, n, T - 1, T, c_q, md, 0, Q_ROW, C, W, PADDING)
    k_new = _window(k, tail, padding, n, T - 1, T, c, md, HQ * K, K_ROW, C, W, PADDING)
    v_new = _window(v, tail, padding, n, T - 1, T, c_v, mf, (HQ + H) * K, V_ROW, C, W, PADDING)
    tl.debug_barrier()  # every thread has read the old tail
    at = tail + (n * C + c) * (W - 1)
    at_v = tail + (n * C + (HQ + H) * K + c_v) * (W - 1)
    for m in tl.static_range(GROUP):
        at_q = tail + (n * C + (head * GROUP + m) * K + d) * (W - 1)
        for w in tl.static_range(W - 1):
            tl.store(at_q + w, q_new[m * W + w + 1].to(tail.dtype.element_ty), mask=md)
    for w in tl.static_range(W - 1):
        tl.store(at + HQ * K * (W - 1) + w, k_new[w + 1].to(tail.dtype.element_ty), mask=md)
        tl.store(at_v + w, v_new[w + 1].to(tail.dtype.element_ty), mask=mf)


@triton.jit
def _shift(head, size: tl.constexpr, REPEATS: tl.constexpr):
    """From the place of head `head` to that of the head whose channels it reads."""
    return (head // REPEATS - head) * size


@triton.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def one_token_kernel(
    q, k, v, a, b, A_log, dt_bias, state, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, k_offset, o, scale,
    eps, H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, QK_SILU: tl.constexpr,
    V_SILU: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, NORM_HEADS: tl.constexpr, PADDING: tl.constexpr,
    OFFSET: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, SIGMOID: tl.constexpr, READ: tl.constexpr,
    UNDECAYED: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, A_ROW: tl.constexpr,
    B_ROW: tl.constexpr, Z_ROW: tl.constexpr, KV_REPEATS: tl.constexpr, SLICE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Process one token; one program per (row, state head).

    AHEAD: load a slice of the state while the previous one is processed.
    """
    C: tl.constexpr = (HQ + H) * K + HV * V
    SLICES: tl.constexpr = (V + SLICE - 1) // SLICE
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    head = tl.program_id(0) % HV
    n = (tl.program_id(0) // HV).to(tl.int64)
    k += _shift(head // (HV // H), K, KV_REPEATS)
    v += _shift(head, V, KV_REPEATS)
    t = n * 0  # keeps t a tensor in the interpreter
    d = tl.arange(0, BK)
    e = tl.arange(0, SLICE)
    f = tl.arange(0, BV)
    md = d < K
    mf = f < V
    at = state + (n * HV + head) * K * V + d[:, None] * V + e[None, :]
    S = tl.load(at, mask=md[:, None] & (e < V)[None, :], other=0.0)
    tl.debug_barrier()  # otherwise the compiler loads the state last
    real = _is_real(padding, n, n >= 0, PADDING)
    qs = ()
    for m in tl.static_range(GROUP):
        q_d = _head(
            q, conv_weight, conv_tail, padding, cos, sin, k_offset, n, t, 1, (head * GROUP + m) // (HO // HQ), d, md,
            0, K, Q_ROW, C, W, R, ROPE_ROWS, False, QK_SILU, PADDING,
        )  # fmt: skip
        qs = qs + (q_d,)
    k_d = _head(
        k, conv_weight, conv_tail, padding, cos, sin, k_offset, n, t, 1, head // (HV // H), d, md, HQ * K, K,
        K_ROW, C, W, R, ROPE_ROWS, OFFSET, QK_SILU, PADDING,
    )  # fmt: skip
    v_f = _channels(
        v, conv_weight, conv_tail, padding, n, t, 1, head * V + f, mf, (HQ + H) * K, V_ROW, C, W, PADDING
    )  # fmt: skip
    if V_SILU:
        v_f = _silu(v_f)
    gamma, beta = _gates(a, b, A_log, dt_bias, n, head, real, A_ROW, B_ROW, BETA, DECAY, SIGMOID)
    z_s = ()
    w_s = ()
    for m in tl.static_range(GROUP):
        out = head * GROUP + m
        for s in tl.static_range(SLICES):
            j = s * SLICE + e
            if GATE:
                m_z = (j < V) & _is_real(padding, e * 0 + n, j < V, PADDING)
                z_s = z_s + (tl.load(z + n * Z_ROW + out * V + j, mask=m_z, other=0.0),)
            if NORM:
                w_s = w_s + (tl.load(norm_weight + (out % NORM_HEADS) * V + j, mask=j < V, other=0.0),)
    if W > 1:
        _move_tail(
            q, k, v, conv_tail, padding, n, t + 1, head, d, md, f, mf, H, HV, HQ, K, V, W, Q_ROW, K_ROW, V_ROW, PADDING
        )
    units = ()
    qks = ()
    squares = ()
    k_scale = 1.0
    for m in tl.static_range(GROUP):
        qq, kk, qk = tl.reduce((qs[m] * qs[m], k_d * k_d, qs[m] * k_d), 0, _add_three)
        k_scale = tl.rsqrt(kk + L2_EPS)
        units = units + (qs[m] * tl.rsqrt(qq + L2_EPS),)
        qks = qks + (qk * tl.rsqrt(qq + L2_EPS) * k_scale,)
        squares = squares + (0.0,)
    k_d = k_d * k_scale
    v_s = ()
    for s in tl.static_range(SLICES):
        v_s = v_s + (tl.gather(v_f, s * SLICE + e, axis=0),)
    o_s = ()
    for s in tl.static_range(SLICES):
        m_next = md[:, None] & ((s + 1) * SLICE + e < V)[None, :]
        if AHEAD and s + 1 < SLICES:
            S_next = tl.load(at + (s + 1) * SLICE, mask=m_next, other=0.0)
        S = S.to(tl.float32)
        kS = tl.sum(k_d[:, None] * S, axis=0)
        delta = _delta(v_s[s], beta, gamma, kS, READ, UNDECAYED)
        sums = ()
        for m in tl.static_range(GROUP):
            o_e = scale * (gamma * tl.sum(units[m][:, None] * S, axis=0) + qks[m] * delta)
            sums = sums + (squares[m] + tl.sum(o_e * o_e, axis=0),)
            o_s = o_s + (o_e,)
        squares = sums
        S = S * gamma + k_d[:, None] * delta[None, :]
        tl.store(at + s * SLICE, S.to(state.dtype.element_ty), mask=md[:, None] & (s * SLICE + e < V)[None, :])
        if s + 1 < SLICES:
            S = S_next if AHEAD else tl.load(at + (s + 1) * SLICE, mask=m_next, other=0.0)
    for m in tl.static_range(GROUP):
        for s in tl.static_range(SLICES):
            o_e = o_s[s * GROUP + m]
            if NORM:
                o_e = o_e * tl.rsqrt(squares[m] / V + eps) * w_s[m * SLICES + s].to(tl.float32)
            if GATE:
                o_e = o_e * _silu(z_s[m * SLICES + s].to(tl.float32))
            at_o = (n * HO + head * GROUP + m) * V + s * SLICE + e
            tl.store(o + at_o, o_e.to(o.dtype.element_ty), mask=s * SLICE + e < V)


@triton.jit(do_not_specialize=["T"])
def step_kernel(
    q, k, v, a, b, A_log, dt_bias, state, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, k_offset, o, scale,
    eps, T, H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, QK_SILU: tl.constexpr,
    V_SILU: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, NORM_HEADS: tl.constexpr, PADDING: tl.constexpr,
    OFFSET: tl.constexpr, BETA: tl.constexpr, DECAY: tl.constexpr, SIGMOID: tl.constexpr, READ: tl.constexpr,
    UNDECAYED: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, A_ROW: tl.constexpr,
    B_ROW: tl.constexpr, Z_ROW: tl.constexpr, KV_REPEATS: tl.constexpr,
):  # fmt: skip
    """Process T tokens; one program per (row, state head)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    C: tl.constexpr = (HQ + H) * K + HV * V
    head = tl.program_id(0) % HV
    n = (tl.program_id(0) // HV).to(tl.int64)
    k += _shift(head // (HV // H), K, KV_REPEATS)
    v += _shift(head, V, KV_REPEATS)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    md = d < K
    me = e < V
    mS = md[:, None] & me[None, :]
    at = state + (n * HV + head) * K * V + d[:, None] * V + e[None, :]
    S = tl.load(at, mask=mS, other=0.0).to(tl.float32)
    for token in range(0, T):
        t = n * 0 + token  # keeps t a tensor in the interpreter
        row = n * T + t
        real = _is_real(padding, row, t >= 0, PADDING)
        k_d = _head(
            k, conv_weight, conv_tail, padding, cos, sin, k_offset, n, t, T, head // (HV // H), d, md, HQ * K, K,
            K_ROW, C, W, R, ROPE_ROWS, OFFSET, QK_SILU, PADDING,
        )  # fmt: skip
        k_d = k_d * tl.rsqrt(tl.sum(k_d * k_d, axis=0) + L2_EPS)
        v_e = _channels(
            v, conv_weight, conv_tail, padding, n, t, T, head * V + e, me, (HQ + H) * K, V_ROW, C, W, PADDING
        )  # fmt: skip
        if V_SILU:
            v_e = _silu(v_e)
        gamma, beta = _gates(a, b, A_log, dt_bias, row, head, real, A_ROW, B_ROW, BETA, DECAY, SIGMOID)
        delta = _delta(v_e, beta, gamma, tl.sum(k_d[:, None] * S, axis=0), READ, UNDECAYED)
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_d = _head(
                q, conv_weight, conv_tail, padding, cos, sin, k_offset, n, t, T, out // (HO // HQ), d, md, 0, K,
                Q_ROW, C, W, R, ROPE_ROWS, False, QK_SILU, PADDING,
            )  # fmt: skip
            q_d = q_d * tl.rsqrt(tl.sum(q_d * q_d, axis=0) + L2_EPS)
            o_e = scale * (gamma * tl.sum(q_d[:, None] * S, axis=0) + tl.sum(q_d * k_d, axis=0) * delta)
            if NORM:
                w_e = tl.load(norm_weight + (out % NORM_HEADS) * V + e, mask=me, other=0.0).to(tl.float32)
                o_e = o_e * tl.rsqrt(tl.sum(o_e * o_e, axis=0) / V + eps) * w_e
            if GATE:
                m_z = me & _is_real(padding, e * 0 + row, me, PADDING)
                o_e = o_e * _silu(tl.load(z + row * Z_ROW + out * V + e, mask=m_z, other=0.0).to(tl.float32))
            tl.store(o + (row * HO + out) * V + e, o_e.to(o.dtype.element_ty), mask=me)
        S = S * gamma + k_d[:, None] * delta[None, :]
    tl.store(at, S.to(state.dtype.element_ty), mask=mS)
    if W > 1:
        _move_tail(
            q, k, v, conv_tail, padding, n, T, head, d, md, e, me, H, HV, HQ, K, V, W, Q_ROW, K_ROW, V_ROW, PADDING
        )
