"""Short causal depthwise convolution with SiLU, state and packed sequences, forward and backward.

    p_t = sum_w weight[w] x_{t-W+1+w} + bias;  y_t = act(p_t)         x_{-1}, x_{-2}, ... from the initial state
    dp_t = dy_t act'(p_t);  dx_t = sum_s weight[W-1-s] dp_{t+s};  dweight[w] = sum_t dp_t x_{t-W+1+w}

The gradient of the initial state is dx at the positions -(W-1) .. -1; the last W-1 inputs are the final state, whose
gradient joins dx there. p is computed again in the backward pass instead of being kept.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .chunk_prepare import Chunks, cut_chunks, locate_chunk, locate_row
from .kernel_config import cdiv, power_of_two
from .launch import launch
from .registration import differentiable, gradient, operator

TOKENS = 64
CHANNELS = 64


@triton.jit
def _input_at(x, state, flat, n, pos, length, d, D: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr, m_d):
    """x [tile, channels] of sequence n at the positions `pos`, negative ones from its state; zero past the end."""
    m = (pos >= 0) & (pos < length)
    tile = tl.load(x + (flat + pos)[:, None] * D + d[None, :], mask=m[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    if INITIAL:
        old = (pos < 0) & (pos >= 1 - W)
        at = (n * D + d)[None, :] * (W - 1) + (W - 1 + pos)[:, None]
        tile += tl.load(state + at, mask=old[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    return tile


@triton.jit
def _pre_activation(
    x, state, weight, bias, flat, n, pos, length, d, D: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr,
    BIAS: tl.constexpr, m_d,
):  # fmt: skip
    p = (pos[:, None] * 0 + d[None, :] * 0).to(tl.float32)
    if BIAS:
        p += tl.load(bias + d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        tap = tl.load(weight + d * W + w, mask=m_d, other=0.0).to(tl.float32)
        p += tap[None, :] * _input_at(x, state, flat, n, pos - (W - 1) + w, length, d, D, W, INITIAL, m_d)
    return p


@triton.jit(do_not_specialize=["T"])
def _conv_forward_kernel(
    x, weight, bias, state, y, cu_seqlens, row_of_chunk, first_chunk, T,
    D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    INITIAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    ND: tl.constexpr = (D + BD - 1) // BD
    c = tl.program_id(0) // ND
    d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    row, first, _, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    n = row
    if VARLEN:
        n = tl.load(row_of_chunk + c).to(tl.int64)
    _, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    pos = first - begin + tl.arange(0, C)
    p = _pre_activation(x, state, weight, bias, flat, n, pos, length, d, D, W, INITIAL, BIAS, d < D)
    if SILU:
        p = p / (1.0 + tl.exp(-p))
    m = (pos < length)[:, None] & (d < D)[None, :]
    tl.store(y + (flat + pos)[:, None] * D + d[None, :], p.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T"])
def _conv_state_kernel(
    x, state, final, cu_seqlens, T, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """final [N, D, W-1]: the last W-1 inputs of each sequence."""
    ND: tl.constexpr = (D + BD - 1) // BD
    n = (tl.program_id(0) // ND).to(tl.int64)
    d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    _, _, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    for j in tl.static_range(W - 1):
        pos = length - (W - 1) + j + tl.arange(0, 1)
        tile = _input_at(x, state, flat, n, pos, length, d, D, W, INITIAL, d < D)
        at = (n * D + d)[None, :] * (W - 1) + j
        tl.store(final + at, tile.to(final.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit(do_not_specialize=["T"])
def _conv_backward_kernel(
    x, weight, bias, state, dy, dfinal, dx, dweight, cu_seqlens, row_of_chunk, first_chunk, T,
    D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, TO_STATE: tl.constexpr,
):  # fmt: skip
    """dx and partial dweight (last row: dbias) of a chunk; TO_STATE: the gradient of sequence c's initial state."""
    ND: tl.constexpr = (D + BD - 1) // BD
    c = tl.program_id(0) // ND
    d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = d < D
    i = tl.arange(0, C)
    if TO_STATE:
        n = c.to(tl.int64)
        _, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
        pos = tl.where(i < W - 1, i - (W - 1), length + W)
    else:
        row, first, _, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
        if valid <= 0:
            return
        n = row
        if VARLEN:
            n = tl.load(row_of_chunk + c).to(tl.int64)
        _, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
        pos = (first - begin).to(tl.int32) + i
    grad = tl.zeros([C, BD], dtype=tl.float32)
    if FINAL:
        j = pos - length + W - 1
        at = (n * D + d)[None, :] * (W - 1) + j[:, None]
        grad += tl.load(dfinal + at, mask=((j >= 0) & (j < W - 1))[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    for s in tl.static_range(W):
        at_s = pos + s
        m = ((at_s >= 0) & (at_s < length))[:, None] & m_d[None, :]
        dp = tl.load(dy + (flat + at_s)[:, None] * D + d[None, :], mask=m, other=0.0).to(tl.float32)
        if SILU:
            p = _pre_activation(x, state, weight, bias, flat, n, at_s, length, d, D, W, INITIAL, BIAS, m_d)
            g = 1.0 / (1.0 + tl.exp(-p))
            dp = dp * g * (1.0 + p * (1.0 - g))
        tap = tl.load(weight + d * W + (W - 1 - s), mask=m_d, other=0.0).to(tl.float32)
        grad += tap[None, :] * dp
        if s == 0 and not TO_STATE:
            sums = dweight + c.to(tl.int64) * (W + 1) * D + d
            for w in tl.static_range(W):
                tile = _input_at(x, state, flat, n, pos - (W - 1) + w, length, d, D, W, INITIAL, m_d)
                tl.store(sums + w * D, tl.sum(dp * tile, axis=0), mask=m_d)
            tl.store(sums + W * D, tl.sum(dp, axis=0), mask=m_d)
    if TO_STATE:
        at = (n * D + d)[None, :] * (W - 1) + i[:, None]
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=(i < W - 1)[:, None] & m_d[None, :])
    else:
        at = (flat + pos)[:, None] * D + d[None, :]
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=(pos < length)[:, None] & m_d[None, :])


def _launch(
    x: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[Chunks, int, dict[str, int]]:
    B, T, D = x.shape
    chunks = cut_chunks(B, T, TOKENS, cu_seqlens)
    BD = min(CHANNELS, power_of_two(D))
    return chunks, cdiv(D, BD), {"D": D, "BD": BD, "W": weight.shape[1]}


def _fake_conv_forward(x, weight, bias, state, cu_seqlens, silu, final):
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, x.new_empty((rows, x.shape[2], weight.shape[1] - 1) if final else (0,))


@operator(_fake_conv_forward)
def conv_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, silu: bool, final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """y and the final state (empty unless asked for)."""
    x, weight = x.contiguous(), weight.contiguous()
    state = None if state is None else state.contiguous()
    chunks, ND, sizes = _launch(x, weight, cu_seqlens)
    (_, T, D), W = x.shape, weight.shape[1]
    y = torch.zeros_like(x) if chunks.varlen else torch.empty_like(x)
    out = x.new_empty((chunks.rows, D, W - 1) if final else (0,))
    launch(
        _conv_forward_kernel, chunks.count * ND,
        x, weight, bias, state, y, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, **sizes, C=TOKENS,
        SILU=silu, BIAS=bias is not None, INITIAL=state is not None, VARLEN=chunks.varlen,
    )  # fmt: skip
    if final and W > 1:
        launch(
            _conv_state_kernel, chunks.rows * ND,
            x, state, out, chunks.cu_seqlens, T, **sizes, INITIAL=state is not None, VARLEN=chunks.varlen,
        )  # fmt: skip
    return y, out


def _fake_conv_backward(dy, dfinal, x, weight, bias, state, cu_seqlens, silu):
    like = [
        x.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
        for t in (x, weight, bias, state)
    ]
    return tuple(like)


@operator(_fake_conv_backward)
def conv_backward(
    dy: torch.Tensor, dfinal: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of x, weight, bias and the initial state (empty where there is none)."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    state = None if state is None else state.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    chunks, ND, sizes = _launch(x, weight, cu_seqlens)
    (_, T, D), W = x.shape, weight.shape[1]
    dx = torch.zeros_like(x) if chunks.varlen else torch.empty_like(x)
    partial = torch.zeros if chunks.varlen else torch.empty
    dweight = partial(chunks.count, W + 1, D, dtype=torch.float32, device=x.device)
    dstate = x.new_empty(0) if state is None else torch.empty_like(state)
    flags = {"SILU": silu, "BIAS": bias is not None, "INITIAL": state is not None, "FINAL": dfinal is not None}
    for out, programs, C in ((dx, chunks.count, TOKENS), (dstate, chunks.rows if dstate.numel() else 0, 16)):
        if programs:
            launch(
                _conv_backward_kernel, programs * ND,
                x, weight, bias, state, dy, dfinal, out, dweight, chunks.cu_seqlens, chunks.row_of_chunk,
                chunks.first_chunk, T, **sizes, **flags, C=C, VARLEN=chunks.varlen, TO_STATE=out is dstate,
            )  # fmt: skip
    total = dweight.sum(0)
    dbias = x.new_empty(0) if bias is None else total[W].to(bias.dtype, copy=True)
    return dx, total[:W].t().to(weight.dtype, copy=True).contiguous(), dbias, dstate


def _setup_context(ctx, inputs, output):
    x, weight, bias, state, cu_seqlens, ctx.silu, ctx.final = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, state, cu_seqlens)


def _backward(ctx, dy, dfinal):
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    grads = conv_backward(dy, dfinal if ctx.final else None, x, weight, bias, state, cu_seqlens, ctx.silu)
    dx, dweight, dbias, dstate = grads
    return dx, dweight, None if bias is None else dbias, None if state is None else dstate, None, None, None


gradient("conv_forward", _backward, _setup_context)
_conv = differentiable(conv_forward, _backward, _setup_context)


def causal_conv1d_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.causal_conv1d` in Triton.

    Raises:
        NotImplementedError: float64.
    """
    if x.dtype == torch.float64:
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    y, final = _conv(x, weight, bias, initial_state, cu_seqlens, activation == "silu", output_final_state)
    return y, final if output_final_state else None
