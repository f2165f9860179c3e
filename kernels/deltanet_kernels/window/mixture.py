"""The output of a window mixed with that of a state, behind the state's norm and gate, in one kernel.

f     = state_output / rms(state_output) * norm_weight * silu(z)               norm and gate optional
share = sigmoid(share_logit + far_slope log(unseen) - near_slope lse)          0 where unseen = 0
unseen = max(min(n, reach) - places - (n - 1) % edge, 0)                       for token number n, from 1
y     = window_output + share (f - window_output)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.config import check_supported
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.window.calls import WindowMixtureCall

TILE = 2048  # elements per program
ALL = 2**30  # a reach beyond every token number


@triton.jit
def state_share(share_logit, far_slope, near_slope, lse, n, places, REACH: tl.constexpr, EDGE: tl.constexpr):
    """The state's share of the outputs, for tokens n from 1; slopes and logits in any dtype."""
    unseen = tl.minimum(n, REACH) - places - tl.maximum(n - 1, 0) % EDGE
    logit = share_logit.to(tl.float32)
    logit += far_slope.to(tl.float32) * tl.log(tl.maximum(unseen, 1).to(tl.float32))
    logit -= near_slope.to(tl.float32) * lse
    return tl.where(unseen > 0, 1.0 / (1.0 + tl.exp(-logit)), 0.0)


@triton.jit(do_not_specialize=["tokens", "T", "before", "period", "places"])
def mixture_kernel(
    window_output, lse, state_output, share_logit, far_slope, near_slope, numbers, z, norm_weight, y, tokens, T, before,
    period, places, eps,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, REACH: tl.constexpr,
    WEIGHTS: tl.constexpr, NUMBERS: tl.constexpr, GATE: tl.constexpr, STATE_ROW: tl.constexpr, S_ROW: tl.constexpr,
    Z_ROW: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One program per ROWS heads of the tokens; numbers (1 to T without any) repeat after `period` tokens.

    state_output is 0 in the first `before` of the T tokens of a row, which it does not have.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = r // H, r % H
    m_r = token < tokens
    d = tl.arange(0, BD)
    m = m_r[:, None] & (d < D)[None, :]
    at = r[:, None] * D + d[None, :]
    own = head[:, None] * D + d[None, :]
    written = token - (token // T + 1) * before
    m_f = m & (token % T >= before)[:, None]
    f_RD = tl.load(state_output + written[:, None] * STATE_ROW + own, mask=m_f, other=0.0).to(tl.float32)
    if WEIGHTS > 0:
        w_RD = tl.load(norm_weight + (head % WEIGHTS)[:, None] * D + d[None, :], mask=m, other=0.0).to(tl.float32)
        f_RD = f_RD * tl.rsqrt(tl.sum(f_RD * f_RD, axis=1) / D + eps)[:, None] * w_RD
    if GATE:
        z_RD = tl.load(z + token[:, None] * Z_ROW + own, mask=m, other=0.0).to(tl.float32)
        f_RD = f_RD * z_RD / (1.0 + tl.exp(-z_RD))
    n = token % period + 1
    if NUMBERS:
        n = tl.load(numbers + token % period, mask=m_r, other=0)
    share = state_share(
        tl.load(share_logit + token * S_ROW + head, mask=m_r, other=0.0),
        tl.load(far_slope + head, mask=m_r, other=0.0), tl.load(near_slope + head, mask=m_r, other=0.0),
        tl.load(lse + r, mask=m_r, other=0.0), n, places, REACH, EDGE,
    )  # fmt: skip
    n_RD = tl.load(window_output + at, mask=m, other=0.0).to(tl.float32)
    tl.store(y + at, (n_RD + share[:, None] * (f_RD - n_RD)).to(y.dtype.element_ty), mask=m)


def _fake_window_mixture(call: WindowMixtureCall):
    return call.window_output.new_empty(call.window_output.shape)


@operator(_fake_window_mixture)
def window_mixture_op(call: WindowMixtureCall) -> torch.Tensor:
    """y [B, T, H, D]."""
    B, T, H, D = call.window_output.shape
    y = call.window_output.new_empty(call.window_output.shape)
    (state_output, state_row), (share_logit, s_row) = rows(call.state_output), rows(call.share_logit)
    z, z_row = (None, 0) if call.z is None else rows(call.z)
    BD = power_of_two(D, 1)
    ROWS = max(1, TILE // BD)
    window_output, lse, far_slope, near_slope = (
        x.contiguous() for x in (call.window_output, call.lse, call.far_slope, call.near_slope)
    )
    numbers, norm_weight = (None if x is None else x.contiguous() for x in (call.numbers, call.norm_weight))
    launch(
        mixture_kernel, cdiv(B * T * H, ROWS),
        window_output, lse, state_output, share_logit, far_slope, near_slope, numbers, z, norm_weight, y, B * T,
        T, T - call.state_output.shape[1], T if numbers is None else numbers.numel(), call.places, call.eps,
        H=H, D=D, BD=BD, ROWS=ROWS, REACH=ALL if call.reach is None else call.reach,
        WEIGHTS=0 if norm_weight is None else norm_weight.numel() // D, NUMBERS=numbers is not None,
        GATE=z is not None, STATE_ROW=state_row, S_ROW=s_row, Z_ROW=z_row, EDGE=call.edge, num_warps=4,
    )  # fmt: skip
    return y


def window_mixture_triton(call: WindowMixtureCall) -> torch.Tensor:
    """`deltanet_kernels.window_mixture` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, or dtypes other than float32, bfloat16, float16.
    """
    D = call.window_output.shape[3]
    check_supported(call.window_output.dtype, D, D)
    return window_mixture_op(call)
