"""The parts of the kernels of step.py: the inputs of a token, its gates and its write, and the convolution's tail.

The tokens of an input X are X_ROW elements apart, see `common/rows.py`; KV_REPEATS neighbouring heads read the same
channels of k and v.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton does not know starred tuples)
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import silu, softplus


@triton.jit
def is_real(padding, row, inside, PADDING: tl.constexpr):
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
        new = m & is_real(padding, n * T + p, p >= 0, PADDING)
        y = tl.load(x + (n * T + p) * ROW + c, mask=new, other=0.0).to(tl.float32)
        if W > 1:
            old = tail + (n * C + first + c) * (W - 1) + (W - 1 + p)
            y += tl.load(old, mask=m & (p < 0), other=0.0).to(tl.float32)
        inputs = inputs + (y,)
    return inputs


@triton.jit
def channels(
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
def head_at(
    x, weight, tail, padding, cos, sin, offset, n, t, T, head, d, m, first, K: tl.constexpr, ROW: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, OFFSET: tl.constexpr,
    SILU: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """Head `head` of q or k at token t: convolved, rotated, centred, activated; not normalised yet."""
    y = channels(x, weight, tail, padding, n, t, T, head * K + d, m, first, ROW, C, W, PADDING)
    if R > 0:
        # The first R channels turn: channel i < R / 2 with channel i + R / 2, whose value is computed again here.
        m_r = m & (d < R)
        other = head * K + tl.where(d < R // 2, d + R // 2, d - R // 2)
        partner = channels(x, weight, tail, padding, n, t, T, other, m_r, first, ROW, C, W, PADDING)
        at = ((n * T if ROPE_ROWS else n * 0) + t) * R + d
        y = y * tl.load(cos + at, mask=m_r, other=1.0).to(tl.float32)
        y += tl.where(d < R // 2, -partner, partner) * tl.load(sin + at, mask=m_r, other=0.0).to(tl.float32)
    if OFFSET:
        y -= tl.load(offset + head * K + d, mask=m, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    return y


@triton.jit
def gates(
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
def delta_value(v, beta, gamma, read, READ: tl.constexpr, UNDECAYED: tl.constexpr):
    """The value that a token writes into a state of which its key reads `read`."""
    if UNDECAYED:
        delta = beta * (v - read)
    elif READ:
        delta = beta * (v - gamma * read)
    else:
        delta = beta * v
    return delta


@triton.jit
def move_tail(
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
def shift(head, size: tl.constexpr, REPEATS: tl.constexpr):
    """From the place of head `head` to that of the head whose channels it reads."""
    return (head // REPEATS - head) * size


@triton.jit
def add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z
