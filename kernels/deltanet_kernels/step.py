"""One decoding step of a whole Gated DeltaNet layer between its projections: one kernel, everything in place.

    q, k, v = act(rope(conv(q|k|v)))                        conv over the token and the W-1 inputs before it
    q, k    = x / sqrt(sum x^2 + 1e-6)                      rope and act on q and k, act on v: as asked for
    S       = e^g S + beta k (v - k^T e^g S)^T              g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)
    o       = rmsnorm(scale S^T q) * weight * silu(z)

A program holds the whole [K, V] state of one head, so that it can norm its output, and owns the head's channels, so
that it can move the convolution's tail on. Larger states, and convolutions whose channels several heads share, take
the separate kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .chunk import MAX_HEAD_SIZE
from .chunk_prepare import L2_EPS, _softplus
from .conv import causal_conv1d_triton
from .kernel_config import power_of_two, step_warps
from .launch import launch
from .norm import gated_rms_norm_triton
from .recurrent import gated_delta_rule_step_
from .registration import operator
from .torch_step import StepParts, compose_step_


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _is_real(padding, row, inside, PADDING: tl.constexpr):
    """Whether tokens `row` count: they lie in this step (`inside`) and are not padding."""
    real = inside
    if PADDING:
        real = real & (tl.load(padding + row, mask=inside, other=1).to(tl.int32) == 0)
    return real


@triton.jit
def _channels(
    x, weight, tail, padding, n, t, T, c, m, first, WIDTH: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Channels c (where m) of x [B, T, WIDTH] at token t, after the convolution that calls them first + c."""
    # Positions have the shape of c: Triton's interpreter takes no mask that is partly a scalar.
    if W == 0:
        p = c * 0 + t
        y = tl.load(x + (n * T + p) * WIDTH + c, mask=m & _is_real(padding, n * T + p, m, PADDING), other=0.0)
        y = y.to(tl.float32)
    else:
        y = (c * 0).to(tl.float32)
        for w in tl.static_range(W):
            p = c * 0 + (t - (W - 1) + w)
            new = m & _is_real(padding, n * T + p, p >= 0, PADDING)
            y_w = tl.load(x + (n * T + p) * WIDTH + c, mask=new, other=0.0).to(tl.float32)
            old = tail + (n * C + first + c) * (W - 1) + (W - 1 + p)
            y_w += tl.load(old, mask=m & (p < 0), other=0.0).to(tl.float32)
            y += tl.load(weight + (first + c) * W + w, mask=m, other=0.0).to(tl.float32) * y_w
    return y


@triton.jit
def _unit_head(
    x, weight, tail, padding, cos, sin, n, t, T, head, d, m, first, K: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, SILU: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """Head `head` of q or k at token t, ready for the recurrence: convolved, rotated, activated, of length 1."""
    y = _channels(x, weight, tail, padding, n, t, T, head * K + d, m, first, WIDTH, C, W, PADDING)
    if R > 0:
        # The first R channels turn: channel i < R / 2 with channel i + R / 2, whose value is computed again here.
        m_r = m & (d < R)
        other = head * K + tl.where(d < R // 2, d + R // 2, d - R // 2)
        partner = _channels(x, weight, tail, padding, n, t, T, other, m_r, first, WIDTH, C, W, PADDING)
        at = ((n * T if ROPE_ROWS else n * 0) + t) * R + d
        y = y * tl.load(cos + at, mask=m_r, other=1.0).to(tl.float32)
        y += tl.where(d < R // 2, -partner, partner) * tl.load(sin + at, mask=m_r, other=0.0).to(tl.float32)
    if SILU:
        y = _silu(y)
    return y * tl.rsqrt(tl.sum(y * y, axis=0) + L2_EPS)


@triton.jit
def _last_inputs(
    x, tail, padding, n, T, c, m, first, WIDTH: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """The W-1 inputs [channels, BW] of channels c after the step, where they go, and which of them there are."""
    j = tl.arange(0, BW)
    p = T - (W - 1) + j
    m_j = j < W - 1
    new = m_j & _is_real(padding, n * T + p, m_j & (p >= 0), PADDING)
    tile = tl.load(x + (n * T + p)[None, :] * WIDTH + c[:, None], mask=m[:, None] & new[None, :], other=0.0)
    at = tail + (n * C + first + c)[:, None] * (W - 1)
    old = tl.load(at + (W - 1 + p)[None, :], mask=m[:, None] & (m_j & (p < 0))[None, :], other=0.0)
    return tile.to(tl.float32) + old.to(tl.float32), at + j[None, :], m[:, None] & m_j[None, :]


@triton.jit(do_not_specialize=["T"])
def _step_kernel(
    q, k, v, a, b, A_log, dt_bias, state, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, o, scale, eps, T,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, W: tl.constexpr, BW: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr,
    QK_SILU: tl.constexpr, V_SILU: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, NORM_HEADS: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """One program a (row, state head)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    C: tl.constexpr = (HQ + H) * K + HV * V
    head = tl.program_id(0) % HV
    n = (tl.program_id(0) // HV).to(tl.int64)
    d = tl.arange(0, BK)
    e = tl.arange(0, BV)
    md = d < K
    me = e < V
    mS = md[:, None] & me[None, :]
    at = state + (n * HV + head) * K * V + d[:, None] * V + e[None, :]
    S = tl.load(at, mask=mS, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    c_v = head * V + e
    for token in range(0, T):
        t = n * 0 + token  # a tensor in the interpreter too
        row = n * T + t
        real = _is_real(padding, row, t >= 0, PADDING)
        k_d = _unit_head(
            k, conv_weight, conv_tail, padding, cos, sin, n, t, T, head // (HV // H), d, md, HQ * K, K, H * K, C, W, R,
            ROPE_ROWS, QK_SILU, PADDING,
        )  # fmt: skip
        v_e = _channels(v, conv_weight, conv_tail, padding, n, t, T, c_v, me, (HQ + H) * K, HV * V, C, W, PADDING)
        if V_SILU:
            v_e = _silu(v_e)
        x = tl.load(a + row * HV + head).to(tl.float32)
        y = tl.load(b + row * HV + head).to(tl.float32)
        gamma = tl.where(real, tl.exp(rate * _softplus(x + bias)), 1.0)
        beta = tl.where(real, 1.0 / (1.0 + tl.exp(-y)), 0.0)
        delta = beta * (v_e - gamma * tl.sum(k_d[:, None] * S, axis=0))
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_d = _unit_head(
                q, conv_weight, conv_tail, padding, cos, sin, n, t, T, out // (HO // HQ), d, md, 0, K, HQ * K, C, W, R,
                ROPE_ROWS, QK_SILU, PADDING,
            )  # fmt: skip
            o_e = scale * (gamma * tl.sum(q_d[:, None] * S, axis=0) + tl.sum(q_d * k_d, axis=0) * delta)
            if NORM:
                w_e = tl.load(norm_weight + (out % NORM_HEADS) * V + e, mask=me, other=0.0).to(tl.float32)
                o_e = o_e * tl.rsqrt(tl.sum(o_e * o_e, axis=0) / V + eps) * w_e
            if GATE:
                m_z = me & _is_real(padding, e * 0 + row, me, PADDING)
                o_e = o_e * _silu(tl.load(z + (row * HO + out) * V + e, mask=m_z, other=0.0).to(tl.float32))
            tl.store(o + (row * HO + out) * V + e, o_e.to(o.dtype.element_ty), mask=me)
        S = S * gamma + k_d[:, None] * delta[None, :]
    tl.store(at, S.to(state.dtype.element_ty), mask=mS)
    if W > 1:
        # Only without head groups: the channels of head `head` of q, k and v belong to this program.
        c = head * K + d
        q_new, q_at, q_m = _last_inputs(q, conv_tail, padding, n, T, c, md, 0, HQ * K, C, W, BW, PADDING)
        k_new, k_at, k_m = _last_inputs(k, conv_tail, padding, n, T, c, md, HQ * K, H * K, C, W, BW, PADDING)
        v_new, v_at, v_m = _last_inputs(v, conv_tail, padding, n, T, c_v, me, (HQ + H) * K, HV * V, C, W, BW, PADDING)
        tl.debug_barrier()  # every thread has read the old tail
        tl.store(q_at, q_new.to(conv_tail.dtype.element_ty), mask=q_m)
        tl.store(k_at, k_new.to(conv_tail.dtype.element_ty), mask=k_m)
        tl.store(v_at, v_new.to(conv_tail.dtype.element_ty), mask=v_m)


def _heads(q: torch.Tensor, k: torch.Tensor, state: torch.Tensor) -> tuple[int, int, int]:
    """HQ, H and HV; q and k come with their heads apart or flat."""
    tokens = q.shape[0] * q.shape[1]
    HV, K = state.shape[1], state.shape[2]
    return q.numel() // (tokens * K), k.numel() // (tokens * K), HV


def _fake_delta_step_(
    q, k, v, a, b, state, A_log, dt_bias, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, scale, eps,
    qk_silu, v_silu,
):  # fmt: skip
    HQ, _, HV = _heads(q, k, state)
    return v.new_empty(q.shape[0], q.shape[1], max(HQ, HV), state.shape[3])


@operator(_fake_delta_step_, mutates=("state", "conv_tail"))
def delta_step_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, state: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, conv_weight: torch.Tensor | None, conv_tail: torch.Tensor | None,
    z: torch.Tensor | None, norm_weight: torch.Tensor | None, padding: torch.Tensor | None,
    cos: torch.Tensor | None, sin: torch.Tensor | None, scale: float, eps: float, qk_silu: bool,
    v_silu: bool,
) -> torch.Tensor:  # fmt: skip
    """o [B, T, max(HQ, HV), V]; the contiguous state and convolution tail move on in place."""
    HQ, H, HV = _heads(q, k, state)
    (B, T), (K, V) = q.shape[:2], state.shape[2:]
    W = 0 if conv_weight is None else conv_weight.shape[1]
    o = v.new_empty(B, T, max(HQ, HV), V)
    BK, BV = power_of_two(K, 1), power_of_two(V, 1)
    launch(
        _step_kernel, B * HV,
        q.contiguous(), k.contiguous(), v.contiguous(), a.contiguous(), b.contiguous(), A_log, dt_bias, state,
        None if conv_weight is None else conv_weight.contiguous(), conv_tail, None if z is None else z.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(), None if padding is None else padding.contiguous(),
        None if cos is None else cos.contiguous(), None if sin is None else sin.contiguous(), o, scale, eps, T,
        H=H, HV=HV, HQ=HQ, K=K, V=V, BK=BK, BV=BV, W=W, BW=power_of_two(max(W - 1, 1), 1),
        R=0 if cos is None else cos.shape[2], ROPE_ROWS=cos is not None and cos.shape[0] > 1,
        QK_SILU=qk_silu, V_SILU=v_silu, GATE=z is not None, NORM=norm_weight is not None,
        NORM_HEADS=1 if norm_weight is None else norm_weight.numel() // V, PADDING=padding is not None,
        num_warps=step_warps(BK * BV),
    )  # fmt: skip
    return o


_PARTS = StepParts(causal_conv1d_triton, gated_delta_rule_step_, gated_rms_norm_triton)
MAX_STATE = 128 * 128  # elements that a program can keep in registers


def gated_delta_step_triton_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_weight: torch.Tensor | None,
    conv_tail: torch.Tensor | None,
    z: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    padding: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    scale: float,
    eps: float,
    qk_silu: bool,
    v_silu: bool,
) -> torch.Tensor:
    """`deltanet_kernels.gated_delta_step_` in Triton.

    Raises:
        NotImplementedError: head sizes over 256, or dtypes other than float32, bfloat16, float16.
    """
    HQ, H, HV = _heads(q, k, state)
    K, V = state.shape[2:]
    if max(K, V) > MAX_HEAD_SIZE:
        raise NotImplementedError(f"head sizes {K} and {V}: the kernels go up to {MAX_HEAD_SIZE}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"dtype {q.dtype}: the kernels take float32, bfloat16 and float16")
    arguments = (q, k, v, a, b, state, A_log, dt_bias, conv_weight, conv_tail, z, norm_weight, padding, cos, sin)
    shared = conv_weight is not None and not HQ == H == HV
    if shared or power_of_two(K, 1) * power_of_two(V, 1) > MAX_STATE:
        return compose_step_(_PARTS, *arguments, scale, eps, qk_silu, v_silu)
    o: torch.Tensor = delta_step_(*arguments, scale, eps, qk_silu, v_silu)
    return o
