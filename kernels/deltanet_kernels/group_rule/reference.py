"""The rule read at boundaries, group by group: what every other form is compared with."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from deltanet_kernels.common.heads import l2_normalize
from deltanet_kernels.gated_delta_rule.reference import naive_gated_delta_rule
from deltanet_kernels.group_rule.calls import GROUP, GroupRuleCall, check_group_rule
from deltanet_kernels.signatures import by_arguments


@by_arguments(GroupRuleCall)
def naive_group_gated_delta_rule(call: GroupRuleCall) -> tuple[Tensor, Tensor | None]:
    """Writes token by token (`naive_gated_delta_rule`), in the widest dtype among the inputs; slow, differentiable.

    Arguments, results and errors as `deltanet_kernels.chunk_group_gated_delta_rule`.
    """
    check_group_rule(call)
    if call.cu_seqlens is not None:
        return _packed(call, call.cu_seqlens.tolist())
    dims, factor = call.rule.dims, call.rule.factor
    q, k, v, g, beta, _, state, final, normalize, _ = call
    dtype = torch.promote_types(torch.promote_types(q.dtype, g.dtype), beta.dtype)
    read = (l2_normalize(q.to(dtype)) if normalize else q.to(dtype)) * factor
    read = read.repeat_interleave(dims.HO // dims.HQ, dim=2)
    if state is None:
        state = v.new_zeros(dims.B, dims.HV, dims.K, dims.V, dtype=dtype)
    outputs = []
    for start in range(0, dims.T, GROUP):
        group = slice(start, start + GROUP)
        heads = state.to(dtype).repeat_interleave(dims.HO // dims.HV, dim=1)
        outputs.append(torch.einsum("bthk,bhkv->bthv", read[:, group], heads))
        _, last = naive_gated_delta_rule(
            q[:, group], k[:, group], v[:, group], g[:, group], beta[:, group], initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=normalize,
        )  # fmt: skip
        assert last is not None
        state = last
    return torch.cat(outputs, dim=1).to(v.dtype), state if final else None


def _packed(call: GroupRuleCall, offsets: list[int]) -> tuple[Tensor, Tensor | None]:
    """The same of each of the sequences in one row by itself."""
    dims, states = call.rule.dims, []
    o = call.v.new_zeros(dims.B, dims.T, dims.HO, dims.V)
    for n, (start, end) in enumerate(pairwise(offsets)):
        state = None if call.initial_state is None else call.initial_state[n : n + 1]
        if start < end:
            tokens = {name: getattr(call, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
            alone = call._replace(**tokens, initial_state=state, output_final_state=True, cu_seqlens=None)
            o[:, start:end], state = naive_group_gated_delta_rule(*alone)
        wide = torch.promote_types(torch.promote_types(call.q.dtype, call.g.dtype), call.beta.dtype)
        states.append(call.v.new_zeros(1, dims.HV, dims.K, dims.V, dtype=wide) if state is None else state)
    return o, torch.cat(states) if call.output_final_state else None
