"""The parts of the kernels of step.py: the inputs of a token, its gates and its write, and the convolution's tail.

The tokens of an input X are X_ROW elements apart, see `common/rows.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton does not know starred tuples)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import silu, softplus


class StepForm(NamedTuple):
    """Form that the kernels of a step are compiled for: their compile-time constant FORM.

    A field is passed on to another function by a name of its own: Triton 3.6 takes no others there.
    """

    H: int
    HV: int
    HQ: int
    K: int
    V: int
    BK: int
    """Width of a tile of K; BV of V."""
    BV: int
    C: int
    """Channels of the convolution."""
    W: int
    """Its tokens; 0 for none."""
    R: int
    """Channels of a head that are rotated."""
    ROPE_ROWS: bool
    """cos and sin have rows of their own for each sequence."""
    QK_SILU: bool
    V_SILU: bool
    NORM_HEADS: int
    """Rows of the norm's weight."""
    BETA: float
    """The greatest write strength with SIGMOID."""
    SIGMOID: bool
    READ: bool
    UNDECAYED: bool
    Q_ROW: int
    K_ROW: int
    V_ROW: int
    A_ROW: int
    B_ROW: int
    Z_ROW: int
    KV_REPEATS: int
    """Neighbouring heads that read the same channels of k and v."""
    STATE_ROW: int = 0
    """With indices: elements between rows of the state; TAIL_ROW of the tail. From here on: of `one_token_kernel`."""
    TAIL_ROW: int = 0
    SLICE: int = 0
    """Columns of the state that are processed at a time."""
    AHEAD: bool = False
    """Load a slice of the state while the previous one is processed."""


@triton.jit
def is_real(padding, row, inside):
    """Whether tokens `row` count: they are in this step (`inside`) and are not padding."""
    real = inside
    if padding is not None:
        real = real & (tl.load(padding + row, mask=inside, other=1).to(tl.int32) == 0)
    return real


@triton.jit
def _window(x, tail, padding, n, t, T, c, m, first, ROW: tl.constexpr, FORM: tl.constexpr):
    """The W inputs of the convolution at token t for channels c (masked by m) of x, whose tokens are ROW apart.

    Oldest first; without a convolution only the token itself. Channel c of x is channel first + c of the convolution.
    """
    W: tl.constexpr = FORM.W
    TAPS: tl.constexpr = W if W > 1 else 1
    inputs = ()
    for w in tl.static_range(TAPS):
        # Positions have the shape of c: Triton's interpreter takes no mask that is partly a scalar.
        p = c * 0 + (t - (TAPS - 1) + w)
        new = m & is_real(padding, n * T + p, p >= 0)
        y = tl.load(x + (n * T + p) * ROW + c, mask=new, other=0.0).to(tl.float32)
        if W > 1:
            old = tail + (n * FORM.C + first + c) * (W - 1) + (W - 1 + p)
            y += tl.load(old, mask=m & (p < 0), other=0.0).to(tl.float32)
        inputs = inputs + (y,)
    return inputs


@triton.jit
def channels(x, weight, tail, padding, n, t, T, c, m, first, ROW: tl.constexpr, FORM: tl.constexpr):
    """Channels c of x at token t, after the convolution if there is one."""
    W: tl.constexpr = FORM.W
    inputs = _window(x, tail, padding, n, t, T, c, m, first, ROW, FORM)
    if W == 0:
        y = inputs[0]
    else:
        y = (c * 0).to(tl.float32)
        for w in tl.static_range(W):
            y += tl.load(weight + (first + c) * W + w, mask=m, other=0.0).to(tl.float32) * inputs[w]
    return y


@triton.jit
def head_at(
    x, weight, tail, padding, cos, sin, offset, n, t, T, head, d, m, first, ROW: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Head `head` of q or k at token t: convolved, rotated, centred, activated; not normalised yet."""
    R: tl.constexpr = FORM.R
    y = channels(x, weight, tail, padding, n, t, T, head * FORM.K + d, m, first, ROW, FORM)
    if R > 0:
        # The first R channels turn: channel i < R / 2 with channel i + R / 2, whose value is computed again here.
        m_r = m & (d < R)
        other = head * FORM.K + tl.where(d < R // 2, d + R // 2, d - R // 2)
        partner = channels(x, weight, tail, padding, n, t, T, other, m_r, first, ROW, FORM)
        at = ((n * T if FORM.ROPE_ROWS else n * 0) + t) * R + d
        y = y * tl.load(cos + at, mask=m_r, other=1.0).to(tl.float32)
        y += tl.where(d < R // 2, -partner, partner) * tl.load(sin + at, mask=m_r, other=0.0).to(tl.float32)
    if offset is not None:
        y -= tl.load(offset + head * FORM.K + d, mask=m, other=0.0).to(tl.float32)
    if FORM.QK_SILU:
        y = silu(y)
    return y


@triton.jit
def gates(a, b, A_log, dt_bias, row, head, real, FORM: tl.constexpr):
    """Decay and write strength of state head `head` at token `row`; a padded token does not change the state."""
    if A_log is not None:
        x = tl.load(a + row * FORM.A_ROW + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        y = tl.load(b + row * FORM.B_ROW + head).to(tl.float32)
        gamma = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x))
    else:
        gamma = tl.exp(tl.load(a + row * FORM.A_ROW + head).to(tl.float32))
        y = tl.load(b + row * FORM.B_ROW + head).to(tl.float32)
    gamma = tl.where(real, gamma, 1.0)
    if FORM.SIGMOID:
        y = FORM.BETA / (1.0 + tl.exp(-y))
    return gamma, tl.where(real, y, 0.0)


@triton.jit
def delta_value(v, beta, gamma, read, FORM: tl.constexpr):
    """The value that a token writes into a state of which its key reads `read`."""
    if FORM.UNDECAYED:
        delta = beta * (v - read)
    elif FORM.READ:
        delta = beta * (v - gamma * read)
    else:
        delta = beta * v
    return delta


@triton.jit
def move_tail(q, k, v, tail, padding, n, T, head, d, md, f, mf, FORM: tl.constexpr):
    """Store the last W-1 inputs of state head `head`, which are this program's alone: H = HV, which divides HQ."""
    Q_ROW: tl.constexpr = FORM.Q_ROW
    K_ROW: tl.constexpr = FORM.K_ROW
    V_ROW: tl.constexpr = FORM.V_ROW
    FIRST_K: tl.constexpr = FORM.HQ * FORM.K
    FIRST_V: tl.constexpr = (FORM.HQ + FORM.H) * FORM.K
    GROUP: tl.constexpr = FORM.HQ // FORM.HV
    PAST: tl.constexpr = FORM.W - 1
    c = head * FORM.K + d
    c_v = head * FORM.V + f
    q_new = ()
    for m in tl.static_range(GROUP):
        c_q = (head * GROUP + m) * FORM.K + d
        q_new = q_new + _window(q, tail, padding, n, T - 1, T, c_q, md, 0, Q_ROW, FORM)
    k_new = _window(k, tail, padding, n, T - 1, T, c, md, FIRST_K, K_ROW, FORM)
    v_new = _window(v, tail, padding, n, T - 1, T, c_v, mf, FIRST_V, V_ROW, FORM)
    tl.debug_barrier()  # every thread has read the old tail
    at = tail + (n * FORM.C + c) * PAST
    at_v = tail + (n * FORM.C + FIRST_V + c_v) * PAST
    for m in tl.static_range(GROUP):
        at_q = tail + (n * FORM.C + (head * GROUP + m) * FORM.K + d) * PAST
        for w in tl.static_range(PAST):
            tl.store(at_q + w, q_new[m * (PAST + 1) + w + 1].to(tail.dtype.element_ty), mask=md)
    for w in tl.static_range(PAST):
        tl.store(at + FIRST_K * PAST + w, k_new[w + 1].to(tail.dtype.element_ty), mask=md)
        tl.store(at_v + w, v_new[w + 1].to(tail.dtype.element_ty), mask=mf)


@triton.jit
def shift(head, FORM: tl.constexpr):
    """From head `head` of k or v to the head whose channels it reads."""
    return head // FORM.KV_REPEATS - head


@triton.jit
def add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z
