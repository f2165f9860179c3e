"""Short causal depthwise convolution with SiLU, state and packed sequences, forward and backward.

    p_t = sum_w weight[w] x_{t-W+1+w} + bias;  y_t = act(p_t)         x_{-1}, x_{-2}, ... from the initial state
    dp_t = dy_t act'(p_t);  dx_t = sum_s weight[W-1-s] dp_{t+s};  dweight[w] = sum_t dp_t x_{t-W+1+w}

The gradient of the initial state is dx at the positions -(W-1) .. -1. The last W-1 inputs are the final state, whose
gradient is added to dx there. The backward pass computes p again instead of keeping it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (Triton does not know starred tuples)
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deltanet_kernels.arguments import ConvCall
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import differentiable_call, operator
from deltanet_kernels.common.sequences import Chunks, cut_chunks, locate_chunk, locate_row
from deltanet_kernels.common.sizes import cdiv, power_of_two

TOKENS = 64  # per program
CHANNELS = 64  # per program
AHEAD = 16  # tokens whose loads are issued together


@triton.jit
def _within(pos, start, stop, m_d):
    """The mask m_d if start <= pos < stop, else all False."""
    pos = tl.where(m_d, pos, stop)
    return (pos >= start) & (pos < stop)


@triton.jit
def _input_at(x, state, n, pos, length, d, D: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr, m_d):
    """Channels d of the input at a position of sequence n; negative positions are in its state; past the end 0."""
    value = tl.load(x + pos * D + d, mask=_within(pos, 0, length, m_d), other=0.0).to(tl.float32)
    if INITIAL:
        at = (n * D + d) * (W - 1) + (W - 1 + pos)
        value += tl.load(state + at, mask=_within(pos, 1 - W, 0, m_d), other=0.0).to(tl.float32)
    return value


@triton.jit
def _sequence(c, row, first, cu_seqlens, row_of_chunk, T, VARLEN: tl.constexpr):
    """A chunk placed by `locate_chunk` -> (its sequence, its first position there, first token and length of that)."""
    n = row
    if VARLEN:
        n = tl.load(row_of_chunk + c).to(tl.int64)
    _, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    return n, first - begin, flat, length


@triton.jit
def _parameters(weight, bias, d, W: tl.constexpr, BIAS: tl.constexpr, m_d):
    """The W taps of channels d, and their bias."""
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + d * W + w, mask=m_d, other=0.0).to(tl.float32),)
    bias_d = tl.zeros_like(d).to(tl.float32)
    if BIAS:
        bias_d += tl.load(bias + d, mask=m_d, other=0.0).to(tl.float32)
    return taps, bias_d


@triton.jit
def _history(x, state, n, pos, length, d, D: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr, m_d):
    """The W-1 inputs before a position, oldest first."""
    inputs = ()
    for w in tl.static_range(W - 1):
        inputs = inputs + (_input_at(x, state, n, pos - (W - 1) + w, length, d, D, W, INITIAL, m_d),)
    return inputs


@triton.jit
def _pre_activation(inputs, taps, bias_d, W: tl.constexpr):
    p = bias_d
    for w in tl.static_range(W):
        p += taps[w] * inputs[w]
    return p


@triton.jit
def _before_activation(dy, inputs, taps, bias_d, W: tl.constexpr, SILU: tl.constexpr):
    """Gradient dp of a token's pre-activation from its dy."""
    if SILU:
        p = _pre_activation(inputs, taps, bias_d, W)
        g = 1.0 / (1.0 + tl.exp(-p))
        dy = dy * g * (1.0 + p * (1.0 - g))
    return dy


@triton.jit(do_not_specialize=["T"])
def _conv_forward_kernel(
    x, weight, bias, state, y, cu_seqlens, row_of_chunk, first_chunk, T,
    D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    INITIAL: tl.constexpr, VARLEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program per chunk of C tokens and BD channels, token by token; a thread holds the window of its channels."""
    ND: tl.constexpr = (D + BD - 1) // BD
    c = tl.program_id(0) // ND
    d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = d < D
    row, first, _, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    n, pos, flat, length = _sequence(c, row, first, cu_seqlens, row_of_chunk, T, VARLEN)
    x += flat * D
    y += flat * D
    taps, bias_d = _parameters(weight, bias, d, W, BIAS, m_d)
    inputs = _history(x, state, n, pos, length, d, D, W, INITIAL, m_d)
    for block in range(0, C, AHEAD):
        window = inputs
        for u in tl.static_range(AHEAD):
            window = window + (_input_at(x, state, n, pos + block + u, length, d, D, W, False, m_d),)
        for u in tl.static_range(AHEAD):
            p = _pre_activation(window[u:], taps, bias_d, W)
            if SILU:
                p = p / (1.0 + tl.exp(-p))
            at = pos + block + u
            tl.store(y + at * D + d, p.to(y.dtype.element_ty), mask=_within(at, 0, length, m_d))
        inputs = window[AHEAD:]


@triton.jit(do_not_specialize=["T"])
def _conv_state_kernel(
    x, state, final, cu_seqlens, T, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, INITIAL: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Store the last W-1 inputs of each sequence in final [N, D, W-1]."""
    ND: tl.constexpr = (D + BD - 1) // BD
    n = (tl.program_id(0) // ND).to(tl.int64)
    d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    _, _, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    for j in tl.static_range(W - 1):
        value = _input_at(x + flat * D, state, n, length - (W - 1) + j, length, d, D, W, INITIAL, d < D)
        tl.store(final + (n * D + d) * (W - 1) + j, value.to(final.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["T"])
def _conv_backward_kernel(
    x, weight, bias, state, dy, dfinal, dx, dweight, cu_seqlens, row_of_chunk, first_chunk, T,
    D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, C: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, TO_STATE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Compute dx and a partial dweight (with dbias as the last column) of a chunk.

    TO_STATE: compute the gradient of the initial state of sequence c instead. Tokens are processed from the last to
    the first, so that dp of the next W-1 tokens is known.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    c = tl.program_id(0) // ND
    d = (tl.program_id(0) % ND) * BD + tl.arange(0, BD)
    m_d = d < D
    if TO_STATE:
        n = c.to(tl.int64)
        _, _, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
        stop = flat * 0
    else:
        row, first, _, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
        if valid <= 0:
            return
        n, pos, flat, length = _sequence(c, row, first, cu_seqlens, row_of_chunk, T, VARLEN)
        stop = pos + C
    x += flat * D
    dy += flat * D
    taps, bias_d = _parameters(weight, bias, d, W, BIAS, m_d)
    inputs = _history(x, state, n, stop, length, d, D, W, INITIAL, m_d)
    behind = inputs
    dps = ()
    sums = ()
    for s in tl.static_range(W - 1):
        behind = behind + (_input_at(x, state, n, stop + s, length, d, D, W, False, m_d),)
        dp = tl.load(dy + (stop + s) * D + d, mask=_within(stop + s, 0, length, m_d), other=0.0).to(tl.float32)
        dps = dps + (_before_activation(dp, behind[s:], taps, bias_d, W, SILU),)
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros([BD], dtype=tl.float32),)
    for block in range(0, C, AHEAD):
        grads = ()
        window = inputs
        for u in tl.static_range(AHEAD):
            at = stop - 1 - block - u
            window = (_input_at(x, state, n, at - (W - 1), length, d, D, W, INITIAL, m_d),) + window
            grads = grads + (tl.load(dy + at * D + d, mask=_within(at, 0, length, m_d), other=0.0).to(tl.float32),)
        for u in tl.static_range(AHEAD):
            at = stop - 1 - block - u
            own = window[AHEAD - 1 - u :]
            dps = (_before_activation(grads[u], own, taps, bias_d, W, SILU),) + dps
            products = ()
            for w in tl.static_range(W):
                products = products + (sums[w] + dps[0] * own[w],)
            sums = products + (sums[W] + dps[0],)
            grad = tl.zeros([BD], dtype=tl.float32)
            if FINAL:
                j = at - length + W - 1
                m = _within(j, 0, W - 1, m_d)
                grad += tl.load(dfinal + (n * D + d) * (W - 1) + j, mask=m, other=0.0).to(tl.float32)
            for s in tl.static_range(W):
                grad += taps[W - 1 - s] * dps[s]
            dps = dps[: W - 1]
            if TO_STATE:
                tl.store(dx + (n * D + d) * (W - 1) + (W - 1 + at), grad.to(dx.dtype.element_ty), mask=m_d)
            else:
                m = _within(at, 0, length, m_d)
                tl.store(dx + (flat + at) * D + d, grad.to(dx.dtype.element_ty), mask=m)
        inputs = window[: W - 1]
    if not TO_STATE:
        SUMS: tl.constexpr = W + 1 if BIAS else W
        for w in tl.static_range(SUMS):
            tl.store(dweight + (c.to(tl.int64) * D + d) * SUMS + w, sums[w], mask=m_d)


class Upstream(NamedTuple):
    """The gradients of the output and of the final state."""

    dy: torch.Tensor
    dfinal: torch.Tensor | None


def _launch(call: ConvCall) -> tuple[Chunks, int, dict[str, int]]:
    B, T, D = call.x.shape
    chunks = cut_chunks(B, T, TOKENS, call.cu_seqlens)
    BD = min(CHANNELS, power_of_two(D))
    return chunks, cdiv(D, BD), {"D": D, "BD": BD, "W": call.weight.shape[1]}


def _fake_conv_forward(call: ConvCall):
    x, cu_seqlens = call.x, call.cu_seqlens
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, x.new_empty((rows, x.shape[2], call.weight.shape[1] - 1) if call.output_final_state else (0,))


@operator(_fake_conv_forward)
def conv_forward(call: ConvCall) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the final state (empty unless requested)."""
    x, weight, bias, final = call.x.contiguous(), call.weight.contiguous(), call.bias, call.output_final_state
    state = None if call.initial_state is None else call.initial_state.contiguous()
    chunks, ND, sizes = _launch(call)
    (_, T, D), W = x.shape, weight.shape[1]
    y = torch.zeros_like(x) if chunks.varlen else torch.empty_like(x)
    out = x.new_empty((chunks.rows, D, W - 1) if final else (0,))
    launch(
        _conv_forward_kernel, chunks.count * ND,
        x, weight, bias, state, y, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, **sizes, C=TOKENS,
        SILU=call.activation == "silu", BIAS=bias is not None, INITIAL=state is not None, VARLEN=chunks.varlen,
        AHEAD=AHEAD, num_warps=1,
    )  # fmt: skip
    if final and W > 1:
        launch(
            _conv_state_kernel, chunks.rows * ND,
            x, state, out, chunks.cu_seqlens, T, **sizes, INITIAL=state is not None, VARLEN=chunks.varlen,
            num_warps=1,
        )  # fmt: skip
    return y, out


def _fake_conv_backward(upstream: Upstream, call: ConvCall):
    inputs = (call.x, call.weight, call.bias, call.initial_state)
    return tuple(
        call.x.new_empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs
    )


@operator(_fake_conv_backward)
def conv_backward(upstream: Upstream, call: ConvCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight, bias and the initial state (empty where there is none)."""
    dy, x, weight, bias = upstream.dy.contiguous(), call.x.contiguous(), call.weight.contiguous(), call.bias
    state = None if call.initial_state is None else call.initial_state.contiguous()
    dfinal = None if upstream.dfinal is None else upstream.dfinal.contiguous()
    chunks, ND, sizes = _launch(call)
    (_, T, D), W = x.shape, weight.shape[1]
    dx = torch.zeros_like(x) if chunks.varlen else torch.empty_like(x)
    partial = torch.zeros if chunks.varlen else torch.empty
    dweight = partial(chunks.count, D, W + (bias is not None), dtype=torch.float32, device=x.device)
    dstate = x.new_empty(0) if state is None else torch.empty_like(state)
    flags = {
        "SILU": call.activation == "silu", "BIAS": bias is not None, "INITIAL": state is not None,
        "FINAL": dfinal is not None,
    }  # fmt: skip
    for out, programs, C in ((dx, chunks.count, TOKENS), (dstate, chunks.rows if dstate.numel() else 0, W - 1)):
        if programs:
            launch(
                _conv_backward_kernel, programs * ND,
                x, weight, bias, state, dy, dfinal, out, dweight, chunks.cu_seqlens, chunks.row_of_chunk,
                chunks.first_chunk, T, **sizes, **flags, C=C, VARLEN=chunks.varlen, TO_STATE=out is dstate,
                AHEAD=min(AHEAD, C), num_warps=1,
            )  # fmt: skip
    total = dweight.sum(0)
    dbias = x.new_empty(0) if bias is None else total[:, W].to(bias.dtype, copy=True)
    return dx, total[:, :W].to(weight.dtype).contiguous(), dbias, dstate


_conv = differentiable_call(conv_forward, conv_backward, ("x", "weight", "bias", "initial_state"), Upstream)


def causal_conv1d_triton(call: ConvCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.causal_conv1d` in Triton, for checked arguments.

    Raises:
        NotImplementedError: float64.
    """
    if call.x.dtype == torch.float64:
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    y, final = _conv(call)
    return y, final if call.output_final_state else None
