"""The rule read at boundaries, group by group: what every other form is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.heads import l2_normalize, spans
from deltanet_kernels.gated_delta_rule.reference import naive_gated_delta_rule
from deltanet_kernels.group_rule.calls import GROUP, GroupRuleCall, check_group_rule
from deltanet_kernels.signatures import by_arguments


@by_arguments(GroupRuleCall)
def naive_group_gated_delta_rule(call: GroupRuleCall) -> tuple[Tensor, Tensor | None]:
    """Writes token by token (`naive_gated_delta_rule`), in the widest dtype among the inputs; slow, differentiable.

    Arguments, results and errors as `deltanet_kernels.chunk_group_gated_delta_rule`.
    """
    check_group_rule(call)
    dims, factor = call.rule.dims, call.rule.factor
    q, k, v, g, beta, _, initial, final, normalize, cu_seqlens = call
    dtype = torch.promote_types(torch.promote_types(q.dtype, g.dtype), beta.dtype)
    read = (l2_normalize(q.to(dtype)) if normalize else q.to(dtype)) * factor
    read = read.repeat_interleave(dims.HO // dims.HQ, dim=2)
    outputs, states = [], []
    for rows, first, end in spans(dims.B, dims.T, cu_seqlens):
        state = None if initial is None else initial[rows]
        if state is None:
            state = v.new_zeros(rows.stop - rows.start, dims.HV, dims.K, dims.V, dtype=dtype)
        for start in range(first, end, GROUP):
            group = slice(start, min(start + GROUP, end))
            heads = state.to(dtype).repeat_interleave(dims.HO // dims.HV, dim=1)
            outputs.append(torch.einsum("bthk,bhkv->bthv", read[:, group], heads))
            _, last = naive_gated_delta_rule(
                q[:, group], k[:, group], v[:, group], g[:, group], beta[:, group], initial_state=state,
                output_final_state=True, use_qk_l2norm_in_kernel=normalize,
            )  # fmt: skip
            assert last is not None
            state = last
        states.append(state)
    return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(states) if final else None
