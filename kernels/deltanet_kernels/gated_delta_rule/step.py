"""One decoding step of a Gated DeltaNet layer between its projections: one kernel that updates state and tail in place.

    q, k, v = act(rope(conv(q|k|v)) - offset)               conv over the token and the W-1 inputs before it
    q, k    = x / sqrt(sum x^2 + 1e-6)                      rope on q and k, offset on k, act: optional
    S       = e^g S + beta k (v - k^T e^g S)^T              v - k^T S and v with erase "undecayed" and "off"
    g       = -exp(A_log) softplus(a + dt_bias)             a without A_log
    beta    = sigmoid(b)                                    2 sigmoid(b) with allow_neg_eigval; or b as it is
    o       = rmsnorm(scale S^T q) * weight * silu(z)

A step of one token processes the state in slices of its columns. Several tokens keep the complete state in a program's
registers (step_kernels.py). If it does not fit there, and for convolutions with key heads that several states share,
the separate kernels run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch

from deltanet_kernels.arguments import StepCall
from deltanet_kernels.common.config import check_supported
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import power_of_two
from deltanet_kernels.common.state_indices import row_size
from deltanet_kernels.conv import causal_conv1d_triton
from deltanet_kernels.gated_delta_rule.cpu_step import CHANGED, StepParts, compose_step_
from deltanet_kernels.gated_delta_rule.recurrent import gated_delta_rule_step_
from deltanet_kernels.gated_delta_rule.step_inputs import StepForm
from deltanet_kernels.gated_delta_rule.step_kernels import one_token_kernel, step_kernel
from deltanet_kernels.gated_delta_rule.step_sizes import step_slices, step_warps
from deltanet_kernels.norm import gated_rms_norm_triton


def _heads(call: StepCall) -> tuple[int, int, int]:
    """HQ, H (repeated) and HV; q and k are [B, T, heads * K] or [B, T, heads, K]."""
    q, k = call.q, call.k
    tokens = q.shape[0] * q.shape[1]
    HV, K = call.state.shape[1:3]
    return q.numel() // (tokens * K), k.numel() // (tokens * K) * call.kv_repeats, HV


def _fake_delta_step_(call: StepCall):
    HQ, _, HV = _heads(call)
    return call.v.new_empty(*call.q.shape[:2], max(HQ, HV), call.state.shape[3])


@operator(_fake_delta_step_, mutates=CHANGED)
def delta_step_(call: StepCall) -> torch.Tensor:
    """Return o [B, T, max(HQ, HV), V] and update the state and the convolution's tail, whose rows are contiguous.

    Several tokens take no indices.
    """
    q, k, v, a, b, state, A_log, dt_bias, conv_weight, conv_tail, z, norm_weight, padding, cos, sin, *_ = call
    k_offset = call.k_offset
    HQ, H, HV = _heads(call)
    (B, T), (K, V) = q.shape[:2], state.shape[2:]
    W = 0 if conv_weight is None else conv_weight.shape[1]
    o = v.new_empty(B, T, max(HQ, HV), V)
    BK, BV = power_of_two(K, 1), power_of_two(V, 1)
    (q, q_row), (k, k_row), (v, v_row), (a, a_row), (b, b_row) = rows(q), rows(k), rows(v), rows(a), rows(b)
    z, z_row = (None, 0) if z is None else rows(z)
    tensors = (
        q, k, v, a, b, A_log, dt_bias, state,
        None if conv_weight is None else conv_weight.contiguous(), conv_tail, z,
        None if norm_weight is None else norm_weight.contiguous(), None if padding is None else padding.contiguous(),
        None if cos is None else cos.contiguous(), None if sin is None else sin.contiguous(),
        None if k_offset is None else k_offset.contiguous(), o,
    )  # fmt: skip
    form = StepForm(
        H=H, HV=HV, HQ=HQ, K=K, V=V, BK=BK, BV=BV, C=(HQ + H) * K + HV * V, W=W, R=0 if cos is None else cos.shape[2],
        ROPE_ROWS=cos is not None and cos.shape[0] > 1, QK_SILU=call.qk_silu, V_SILU=call.v_silu,
        NORM_HEADS=1 if norm_weight is None else norm_weight.numel() // V, BETA=2.0 if call.allow_neg_eigval else 1.0,
        SIGMOID=call.use_beta_sigmoid_in_kernel, READ=call.erase != "off", UNDECAYED=call.erase == "undecayed",
        Q_ROW=q_row, K_ROW=k_row, V_ROW=v_row, A_ROW=a_row, B_ROW=b_row, Z_ROW=z_row, KV_REPEATS=call.kv_repeats,
    )  # fmt: skip
    if T == 1:
        width, warps, ahead = step_slices(K, V, B * HV, multiprocessors(state.device))
        form = form._replace(STATE_ROW=row_size(state), TAIL_ROW=row_size(conv_tail), SLICE=width, AHEAD=ahead)
        launch(
            one_token_kernel, B * HV, *tensors, call.state_indices, call.factor, call.eps, FORM=form, num_warps=warps
        )
    else:
        warps = step_warps(BK * BV)
        launch(step_kernel, B * HV, *tensors, call.factor, call.eps, T, FORM=form, num_warps=warps)
    return o


_PARTS = StepParts(causal_conv1d_triton, gated_delta_rule_step_, gated_rms_norm_triton)
MAX_STATE = 128 * 128  # elements that a program can keep in registers


def gated_delta_step_triton_(call: StepCall) -> torch.Tensor:
    """`deltanet_kernels.gated_delta_step_` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, or dtypes other than float32, bfloat16, float16.
    """
    HQ, H, HV = _heads(call)
    K, V = call.state.shape[2:]
    check_supported(call.q.dtype, K, V)
    shared = call.conv_weight is not None and (H != HV or HQ % HV != 0)
    large = power_of_two(K, 1) * power_of_two(V, 1) > MAX_STATE
    if shared or (call.q.shape[1] > 1 and (large or call.state_indices is not None)):
        return compose_step_(_PARTS, call)
    return delta_step_(call)
