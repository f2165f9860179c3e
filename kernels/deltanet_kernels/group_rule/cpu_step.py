"""Beside a state of what has left its window: the gates of a prompt, and one token, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.registration import is_observed
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.gated_delta_rule.cpu_recurrent import torch_recurrent_gated_delta_rule
from deltanet_kernels.group_rule.calls import GROUP, KEPT, GroupGatesCall, GroupStepCall, RoundStateCall
from deltanet_kernels.group_rule.rounding import torch_round_state
from deltanet_kernels.packed_cache.reference import torch_packed_step_
from deltanet_kernels.prompt.calls import GateValuesCall
from deltanet_kernels.prompt.cpu import torch_gate_values
from deltanet_kernels.window.cpu_prompt import torch_window_mixture


def torch_group_gates(call: GroupGatesCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`deltanet_kernels.group_gates` in PyTorch."""
    if call.cu_seqlens is not None:
        return _packed_gates(call, call.cu_seqlens.diff().tolist())
    (B, T, H), hidden = call.a.shape, GROUP * call.groups
    places, device = hidden + GROUP, call.a.device
    end = torch.full((1,), T, device=device) if call.length is None else call.length
    token = torch.arange(T, device=device)
    left = (end - 1 - hidden).div(GROUP, rounding_mode="floor") * GROUP
    writes = ((token >= call.sinks) & (token < left))[: max(T - hidden, 0), None]
    at = (token % places).where((token < end) & (token >= end - places), places)
    gates = [
        x.bfloat16() for x in torch_gate_values(GateValuesCall(call.a, call.b, call.A_log, call.dt_bias, call.limit))
    ]
    waiting = [x.new_zeros(B, places + 1, H).index_copy_(1, at, x)[:, :-1].contiguous() for x in gates]
    g, beta = (x[:, : len(writes)].float() * writes for x in gates)
    return g, beta, *waiting  # type: ignore[return-value]


def _packed_gates(call: GroupGatesCall, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`torch_group_gates` of each of the sequences in one row by itself."""
    written, waiting = [], []
    for a, b in zip(*(x.split(lengths, dim=1) for x in call[:2]), strict=True):
        *own, waits_g, waits_beta = torch_group_gates(call._replace(a=a, b=b, cu_seqlens=None))
        written.append([F.pad(x, (0, 0, 0, a.shape[1] - x.shape[1])) for x in own])
        waiting.append((waits_g, waits_beta))
    length = max(call.a.shape[1] - GROUP * call.groups, 0)
    g, beta = (torch.cat(x, dim=1)[:, :length] for x in zip(*written, strict=True))
    return g, beta, *map(torch.cat, zip(*waiting, strict=True))  # type: ignore[return-value]


def torch_group_step_(call: GroupStepCall) -> Tensor:
    """`deltanet_kernels.group_gated_delta_step_` for checked arguments."""
    if call.token.state_indices is not None:
        return _step_by_indices(call, call.token.state_indices.long())
    read = _read(call)  # before the token's group takes the place of the one that leaves
    return torch_window_mixture(call.mixture(*torch_packed_step_(call.token), read))


def _step_by_indices(call: GroupStepCall, rows: Tensor) -> Tensor:
    """A step of a call with indices, on copies of rows, which are then put back."""
    token, names = call.token, [name for name in KEPT if getattr(call, name) is not None]
    held = [*token.cache.tensors, *(getattr(call, name) for name in names)]
    own = [x[rows] for x in held]
    token = token._replace(cache=token.cache.with_tensors(own[:8]), state_indices=None)
    o = torch_group_step_(call._replace(token=token, **dict(zip(names, own[8:], strict=True))))
    for x, copy in zip(held, own, strict=True):
        x[rows] = copy
    return o


def _read(call: GroupStepCall) -> Tensor:
    """The token's reads from its state [B, 1, HQ, D], once the group that leaves is written into it, and its gates
    wait; float32, or float64 for float64 queries."""
    token, q = call.token, call.token.q
    cache, wide = token.cache, torch.promote_types(q.dtype, torch.float32)
    number, groups, row = cache.lengths.long(), cache.groups, torch.arange(len(q), device=q.device)
    state = call.state.to(wide)
    if call.state_scale is not None:
        state = state * call.state_scale.to(wide).unsqueeze(-1)
    leaves = (number % GROUP == 0) & (number >= GROUP * (groups + 1))
    if is_observed() or bool(leaves.any()):
        first = (number - GROUP * (groups + 1)).clamp_min(0)
        k, v = (x.transpose(1, 2).to(wide) for x in cache.group(first // GROUP % groups, q.dtype))
        times = state.shape[1] // k.shape[2]
        leaving = first[:, None] + torch.arange(GROUP, device=q.device)
        kept = (leaving >= token.sinks).unsqueeze(-1)
        g, beta = (x[row[:, None], leaving % x.shape[1]].to(wide) * kept for x in (call.g, call.beta))
        k, v = k.repeat_interleave(times, 2), v.repeat_interleave(times, 2)
        after = torch_recurrent_gated_delta_rule(RuleCall(k, k, v, g, beta, None, state, True, True))[1]
        assert after is not None
        changed = leaves.view(-1, 1, 1, 1)
        state = after.where(changed, state)
        codes = after
        if call.state_scale is not None:
            codes, scale = torch_round_state(RoundStateCall(after))
            call.state_scale.copy_(scale.where(changed[..., 0], call.state_scale))
        call.state.copy_(codes.to(call.state.dtype).where(changed, call.state))
    gates = torch_gate_values(GateValuesCall(*call[:4], call.max_strength))
    for held, new in zip((call.g, call.beta), gates, strict=True):
        held[row, number % held.shape[1]] = new[:, 0].to(held.dtype)
    if token.cos is not None and token.sin is not None:
        q = rotate(q, token.cos, token.sin)
    x = q[:, 0].to(wide).unflatten(1, (state.shape[1], -1))  # [B, H, HQ / H, D]
    unit = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return (x.shape[-1] ** -0.5 * (unit @ state)).flatten(1, 2).unsqueeze(1).to(q.dtype)
