"""Convolution, rotary embedding, offset of the keys and SiLU of a prompt's q, k and v in one kernel.

    y_t = sum_w weight[w] x_{t-W+1+w}            with a convolution; x_{-1}, x_{-2}, ... from the tail
    y_t = rope(y_t);  k_t = k_t - offset;  y_t = silu(y_t)                       each optional; v has no rotation
    window q, k = rope(x_t)                                                      optional: for a window beside the state
    tail = x_{T-W+1} .. x_{T-1}                                                  with a convolution, optional

k and v may be repeated: KV_REPEATS neighbouring heads read the same channels of x, each by a convolution of its own.

A program computes one head of a tile of tokens, as the two halves of its channels that turn against each other:
channels i and i + R/2 of the R that turn, and the others in two halves as well.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.config import check_supported
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import Registered, operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.common.tiles import silu
from deltanet_kernels.prompt.calls import PromptInputs, PromptInputsCall

TILE = 2048  # elements of half a head in a tile of tokens
MAX_TAPS = 5


@triton.jit
def _input_at(
    x, tail, b, t, c, m, T, X_ROW: tl.constexpr, FIRST: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """Channels c (masked by m) of the inputs at tokens t [BT] of row b, in float32; before the first from the tail."""
    at = (b * T + t) * X_ROW
    y = tl.load(x + at[:, None] + c[None, :], mask=((t >= 0) & (t < T))[:, None] & m[None, :], other=0.0)
    y = y.to(tl.float32)
    if INITIAL:
        before = (b * C + FIRST + c)[None, :] * (W - 1) + (W - 1 + t)[:, None]
        y += tl.load(tail + before, mask=(t < 0)[:, None] & m[None, :], other=0.0).to(tl.float32)
    return y


@triton.jit
def _convolved(
    x, weight, tail, b, t, c, m, T, X_ROW: tl.constexpr, FIRST: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """Channels c of the inputs at tokens t, and behind the convolution (W = 0: the same)."""
    x_TC = _input_at(x, tail, b, t, c, m, T, X_ROW, FIRST, C, W, False)
    y_TC = x_TC
    if W > 0:
        y_TC = tl.zeros_like(x_TC)
        for w in tl.static_range(W):
            taps = tl.load(weight + (FIRST + c) * W + w, mask=m, other=0.0).to(tl.float32)
            if w < W - 1:
                y_TC += taps[None, :] * _input_at(x, tail, b, t + (w + 1 - W), c, m, T, X_ROW, FIRST, C, W, INITIAL)
            else:
                y_TC += taps[None, :] * x_TC
    return x_TC, y_TC


@triton.jit
def _store_tail(
    x, tail, new_tail, b, c, m, T, X_ROW: tl.constexpr, FIRST: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """Store channels c of the last W-1 inputs."""
    j = tl.arange(0, 4)
    last = _input_at(x, tail, b, T - (W - 1) + j, c, m, T, X_ROW, FIRST, C, W, INITIAL)
    to = (b * C + FIRST + c)[None, :] * (W - 1) + j[:, None]
    tl.store(new_tail + to, last.to(new_tail.dtype.element_ty), mask=(j < W - 1)[:, None] & m[None, :])


@triton.jit
def _stored(y, y_TC, offset, at, c, m, OFFSET: tl.constexpr, SILU: tl.constexpr):
    if OFFSET:
        y_TC -= tl.load(offset + c, mask=c >= 0, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y_TC = silu(y_TC)
    tl.store(y + at, y_TC.to(y.dtype.element_ty), mask=m)


@triton.jit
def _head(
    x, y, plain, weight, tail, new_tail, offset, cos, sin, b, tile, head, T, HEADS: tl.constexpr,
    PLAIN_HEADS: tl.constexpr, REPEATS: tl.constexpr, OFFSETS: tl.constexpr, X_ROW: tl.constexpr,
    FIRST: tl.constexpr, C: tl.constexpr, W: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    ROPE_ROWS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, SILU: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """One head of y [B, T, HEADS, D], and of plain [B, T, PLAIN_HEADS, D], the last heads of x without convolution."""
    own_head = head // REPEATS
    x += (own_head - head) * D  # channel c of y is then at x + c
    HALF: tl.constexpr = (D + 1) // 2
    i = tl.arange(0, BH)
    if R == 0 or R == D:
        d1 = i
        d2 = i + HALF
    else:
        d1 = tl.where(i < R // 2, i, i + R // 2)
        d2 = tl.where(i < R // 2, i + R // 2, i + R // 2 + (D - R + 1) // 2)
    m1 = i < HALF
    m2 = m1 & (d2 < D)
    t = tile * BT + tl.arange(0, BT)
    c1 = head * D + d1
    c2 = head * D + d2
    x1, y1 = _convolved(x, weight, tail, b, t, c1, m1, T, X_ROW, FIRST, C, W, INITIAL)
    x2, y2 = _convolved(x, weight, tail, b, t, c2, m2, T, X_ROW, FIRST, C, W, INITIAL)
    m_T = t < T
    m_1 = m_T[:, None] & m1[None, :]
    m_2 = m_T[:, None] & m2[None, :]
    if R > 0:
        row = (b if ROPE_ROWS else b * 0) * T
        at = (row + t)[:, None] * R + i[None, :]
        m_R = m_T[:, None] & (i < R // 2)[None, :]
        cos1 = tl.load(cos + at, mask=m_R, other=1.0).to(tl.float32)
        sin1 = tl.load(sin + at, mask=m_R, other=0.0).to(tl.float32)
        cos2 = tl.load(cos + at + R // 2, mask=m_R, other=1.0).to(tl.float32)
        sin2 = tl.load(sin + at + R // 2, mask=m_R, other=0.0).to(tl.float32)
        turned = y1 * cos1 - y2 * sin1
        y2 = y2 * cos2 + y1 * sin2
        y1 = turned
        if PLAIN_HEADS > 0:
            turned = x1 * cos1 - x2 * sin1
            x2 = x2 * cos2 + x1 * sin2
            x1 = turned
    at = ((b * T + t) * HEADS + head)[:, None] * D
    own = 0
    if OFFSETS > 0:
        own = (head % OFFSETS) * D
    _stored(y, y1, offset, at + d1[None, :], tl.where(m1, own + d1, -1), m_1, OFFSETS > 0, SILU)
    _stored(y, y2, offset, at + d2[None, :], tl.where(m2, own + d2, -1), m_2, OFFSETS > 0, SILU)
    if PLAIN_HEADS > 0:
        plain_head = own_head - (HEADS // REPEATS - PLAIN_HEADS)
        at = ((b * T + t) * PLAIN_HEADS + plain_head)[:, None] * D
        m_P = t < tl.where((plain_head < 0) | (head % REPEATS != 0), 0, T)
        tl.store(plain + at + d1[None, :], x1.to(plain.dtype.element_ty), mask=m_P[:, None] & m1[None, :])
        tl.store(plain + at + d2[None, :], x2.to(plain.dtype.element_ty), mask=m_P[:, None] & m2[None, :])
    if FINAL:
        stop = tl.where(tile == (T - 1) // BT, BH, 0)  # the last tile stores it
        _store_tail(x, tail, new_tail, b, c1, m1 & (i < stop), T, X_ROW, FIRST, C, W, INITIAL)
        _store_tail(x, tail, new_tail, b, c2, m2 & (i < stop), T, X_ROW, FIRST, C, W, INITIAL)


@triton.jit(do_not_specialize=["T"])
def prompt_inputs_kernel(
    q, k, v, q_y, k_y, v_y, q_plain, k_plain, weight, tail, new_tail, offset, cos, sin, T,
    HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, PLAIN_Q: tl.constexpr, PLAIN_K: tl.constexpr,
    KV_REPEATS: tl.constexpr, OFFSETS: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, D: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr, QK_SILU: tl.constexpr, V_SILU: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """One program per row, BT tokens and head of q, k and v (HV = 0: v stays as it is); rows of x are X_ROW apart."""
    HEADS: tl.constexpr = HQ + HK + HV
    head = tl.program_id(0) % HEADS
    TILES = (T + BT - 1) // BT
    tile = tl.program_id(0) // HEADS % TILES
    b = (tl.program_id(0) // HEADS // TILES).to(tl.int64)
    if head < HQ:
        _head(
            q, q_y, q_plain, weight, tail, new_tail, offset, cos, sin, b, tile, head, T, HQ, PLAIN_Q, 1, 0,
            Q_ROW, 0, C, W, D, R, ROPE_ROWS, BT, BH, QK_SILU, INITIAL, FINAL,
        )  # fmt: skip
    elif head < HQ + HK:
        _head(
            k, k_y, k_plain, weight, tail, new_tail, offset, cos, sin, b, tile, head - HQ, T, HK, PLAIN_K,
            KV_REPEATS, OFFSETS, K_ROW, HQ * D, C, W, D, R, ROPE_ROWS, BT, BH, QK_SILU, INITIAL, FINAL,
        )  # fmt: skip
    else:
        _head(
            v, v_y, v_y, weight, tail, new_tail, offset, cos, sin, b, tile, head - HQ - HK, T, HV, 0,
            KV_REPEATS, 0, V_ROW, (HQ + HK) * D, C, W, D, 0, ROPE_ROWS, BT, BH, V_SILU, INITIAL, FINAL,
        )  # fmt: skip


def _empty_outputs(call: PromptInputsCall) -> tuple[torch.Tensor | None, ...]:
    """q, k, v of the state, q and k of the window, and the new tail, not yet computed; None for what is not wanted."""
    q, D, weight, windowed = call.q, call.head_dim, call.conv_weight, call.window_heads
    (B, T, CQ), (CK, CV) = q.shape, (x.shape[2] * call.kv_repeats for x in (call.k, call.v))
    changed = weight is not None or call.v_silu or call.kv_repeats > 1
    return (
        q.new_empty((B, T, CQ // D, D)),
        q.new_empty((B, T, CK // D, D)),
        q.new_empty((B, T, CV // D, D)) if changed else None,
        q.new_empty((B, T, CQ // D, D)) if windowed else None,
        q.new_empty((B, T, windowed, D)) if windowed else None,
        q.new_empty((B, CQ + CK + CV, weight.shape[1] - 1)) if weight is not None and call.output_tail else None,
    )


def _prompt_inputs(call: PromptInputsCall) -> tuple[torch.Tensor | None, ...]:
    """As `prompt_inputs_op`, with None for what is empty; the kernel has an address for v in any case."""
    outputs = _empty_outputs(call)
    q_y, k_y, v_y, q_plain, k_plain, new_tail = outputs
    (B, T, CQ), D = call.q.shape, call.head_dim
    CK, CV = (x.shape[2] * call.kv_repeats for x in (call.k, call.v))
    (q, q_row), (k, k_row), (v, v_row) = rows(call.q), rows(call.k), rows(call.v)
    weight, tail, cos, sin, offset = (None if x is None else x.contiguous() for x in call[4:9])
    BH = power_of_two((D + 1) // 2, 1)
    BT = max(1, TILE // BH)
    heads = [CQ // D, CK // D, 0 if v_y is None else CV // D]
    W = 0 if weight is None else weight.shape[1]
    launch(
        prompt_inputs_kernel, B * cdiv(T, BT) * sum(heads),
        q, k, v, q_y, k_y, k_y if v_y is None else v_y, q_plain, k_plain, weight, tail, new_tail, offset, cos, sin, T,
        HQ=heads[0], HK=heads[1], HV=heads[2], PLAIN_Q=heads[0] if call.window_heads else 0, PLAIN_K=call.window_heads,
        KV_REPEATS=call.kv_repeats, OFFSETS=0 if offset is None else offset.shape[0],
        Q_ROW=q_row, K_ROW=k_row, V_ROW=v_row, C=CQ + CK + CV, W=W, D=D, R=0 if cos is None else cos.shape[2],
        ROPE_ROWS=cos is not None and cos.shape[0] > 1, BT=BT, BH=BH,
        QK_SILU=call.qk_silu, V_SILU=call.v_silu, INITIAL=tail is not None and W > 1,
        FINAL=new_tail is not None and W > 1, num_warps=4,
    )  # fmt: skip
    return outputs


def _fake_prompt_inputs(call: PromptInputsCall):
    return tuple(call.q.new_empty(0) if x is None else x for x in _empty_outputs(call))


@operator(_fake_prompt_inputs)
def prompt_inputs_op(
    call: PromptInputsCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the state, q and k of the window, and the new tail; what is not computed is empty."""
    outputs = _prompt_inputs(call)
    return tuple(call.q.new_empty(0) if x is None else x for x in outputs)  # type: ignore[return-value]


_operator = Registered(_prompt_inputs, prompt_inputs_op.op, prompt_inputs_op.calls)


def prompt_inputs_triton(call: PromptInputsCall) -> PromptInputs:
    """`deltanet_kernels.prompt_inputs` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, convolutions over more than 5 tokens, or dtypes other than float32,
            bfloat16, float16.
    """
    check_supported(call.q.dtype, call.head_dim, call.head_dim)
    if call.conv_weight is not None and call.conv_weight.shape[1] > MAX_TAPS:
        raise NotImplementedError(f"{call.conv_weight.shape[1]} taps: the kernel takes up to {MAX_TAPS}")
    q, k, v, window_q, window_k, tail = _operator(call)
    if v is None or not v.numel():  # nothing changes it
        v = call.v.view(*call.v.shape[:2], -1, call.head_dim)
    if not call.window_heads:
        window_q = window_k = None
    return PromptInputs(q, k, v, window_q, window_k, tail if call.output_tail else None)  # type: ignore[arg-type]
