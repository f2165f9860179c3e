"""One token beside a state of what has left its window, on CUDA: one launch more than of a window's own step.

The first writes the group that leaves into the state, and the last also reads the state and mixes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.online_softmax import COMBINED
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import power_of_two
from deltanet_kernels.common.state_indices import row_size
from deltanet_kernels.common.token_step import COUNT_BITS
from deltanet_kernels.group_rule.calls import KEPT, GroupStepCall
from deltanet_kernels.group_rule.step_kernels import Rows, group_mix_kernel, group_token_kernel, group_write_kernel
from deltanet_kernels.packed_cache.launches import CACHE, check_step_supported, in_pairs, places_of, span_parts
from deltanet_kernels.window.mixture import ALL


def _fake_step(call: GroupStepCall):
    return call.token.q.new_empty(call.token.q.shape)


@operator(_fake_step, mutates=(*KEPT, *CACHE))
def group_step_op_(call: GroupStepCall) -> Tensor:
    """o [B, 1, HQ, D]."""
    token, state, z, norm_weight = call.token, call.state, call.z, call.norm_weight
    cache, (B, _, HQ, D), H, HK = token.cache, token.q.shape, state.shape[1], token.k.shape[2]
    state_indices, pages = token.state_indices, token.packed_rows
    kept = cache.lengths, call.g, call.beta, state, call.state_scale
    kept_rows = None if state_indices is None else Rows(*map(row_size, kept))
    warps = 4 if D <= 64 else 8  # whose registers hold a state
    turned = token.q.contiguous() if token.cos is None else token.q.new_empty(token.q.shape)
    (q, q_row), (k, k_row), (v, v_row), (a, a_row), (b, b_row), (share_logit, s_row) = map(
        rows, (token.q, token.k, token.v, call.a, call.b, call.share_logit)
    )
    read = turned.new_empty(turned.shape, dtype=torch.float32)
    cos, sin = (None if x is None else x.contiguous() for x in (token.cos, token.sin))
    sizes = dict(
        PLACES=places_of(cache, pages), ROWS=kept_rows, HK=HK, H=H, HEADS=HQ // HK, D=D, BITS=cache.bits,
        R=0 if cos is None else cos.shape[2], ROPE_ROWS=cos is not None and cos.shape[0] > 1,
    )  # fmt: skip
    launch(
        group_write_kernel, B * H, cache.key_codes, cache.key_scales, cache.value_codes, cache.value_scales,
        cache.lengths, cache.key_order, state_indices, q, cos, sin, call.g, call.beta, state, call.state_scale, read,
        cache.groups, token.sinks, D**-0.5, q_row, **sizes, PAIRS=in_pairs(cache.bits, q), num_warps=warps,
    )  # fmt: skip
    launch(
        group_token_kernel, B * HK, *cache, state_indices, q, k, v, cos, sin, turned, a, b, call.A_log, call.dt_bias,
        call.g, call.beta, cache.groups, q_row, k_row, v_row, a_row, b_row, **sizes, BM=power_of_two(HQ // HK, 1),
        LIMIT=call.max_strength, COUNT_BITS=COUNT_BITS, num_warps=4,
    )  # fmt: skip
    parts, weights = span_parts(token._replace(q=turned).attention, state_indices, pages)
    z, z_row = (None, 0) if z is None else rows(z)
    o = token.q.new_empty(token.q.shape)
    launch(
        group_mix_kernel, B * HQ, parts, weights, turned, cache.lengths, state_indices, state, call.state_scale, read,
        share_logit, call.far_slope, call.near_slope, z, norm_weight, o, parts.shape[2], call.places, D**-0.5, call.eps,
        s_row, z_row, ROWS=kept_rows, HQ=HQ, H=H, D=D, BN=COMBINED // D,
        WEIGHTS=0 if norm_weight is None else norm_weight.numel() // D, REACH=ALL, num_warps=warps,
    )  # fmt: skip
    return o


def group_step_triton_(call: GroupStepCall) -> Tensor:
    """`deltanet_kernels.group_gated_delta_step_` in Triton, for checked arguments.

    Raises:
        NotImplementedError: other head sizes than 64 and 128, or as `packed_step_triton_`.
    """
    check_step_supported(call.token)
    if call.token.q.shape[3] > 128:
        raise NotImplementedError(f"heads of {call.token.q.shape[3]}: the kernel takes 64 and 128")
    return group_step_op_(call)
