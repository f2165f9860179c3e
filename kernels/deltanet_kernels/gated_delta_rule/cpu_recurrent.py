"""The gated delta rule token by token in plain PyTorch: decoding on CPU, a few operations per token."""

import torch

from deltanet_kernels.arguments import Erase, RuleCall
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.gated_delta_rule.cpu import chunked
from deltanet_kernels.gated_delta_rule.cpu_forward import inverse_norm
from deltanet_kernels.gated_delta_rule.reference import log_decay_and_strength

# Up to this many tokens the recurrence is faster than one chunk.
MAX_STEPS = 8


def torch_recurrent_gated_delta_rule(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.fused_recurrent_gated_delta_rule` in PyTorch, for checked arguments; differentiable.

    Computes in float32 (float64 for float64 inputs). Long or packed inputs and calls that need gradients use the
    chunked form, which computes the same results faster.
    """
    if call.needs_gradients() or call.cu_seqlens is not None or call.q.shape[1] > MAX_STEPS:
        return chunked(call)
    if call.initial_state is None:
        dims, dtype = call.dims, torch.promote_types(call.q.dtype, torch.float32)
        state = torch.zeros(dims.B, dims.HV, dims.K, dims.V, dtype=dtype, device=call.q.device)
    else:
        state = call.initial_state.clone()
    o = torch_recurrent_step_(
        call.q, call.k, call.v, call.g, call.beta, state, call.factor, call.use_qk_l2norm_in_kernel, A_log=call.A_log,
        dt_bias=call.dt_bias, use_beta_sigmoid_in_kernel=call.use_beta_sigmoid_in_kernel, erase=call.erase,
    )  # fmt: skip
    return o, state if call.output_final_state else None


def torch_recurrent_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    use_qk_l2norm_in_kernel: bool,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    erase: Erase,
) -> torch.Tensor:
    """The recurrence, updating the state [B, HV, K, V] in place; with A_log and dt_bias, g is the raw gate logit."""
    (B, T, HQ, _), (HV, V) = q.shape, v.shape[2:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    with no_autocast(q.device):
        g, beta = log_decay_and_strength(g, beta, A_log, dt_bias, use_beta_sigmoid_in_kernel, dtype)
        q_, k_ = by_state(q.to(dtype), k.to(dtype), HV, scale, use_qk_l2norm_in_kernel)
        v_, decay = v.to(dtype), g.exp()
        S = state.to(dtype)
        outputs = []
        for t in range(T):
            value, fade = v_[:, t].unsqueeze(2), decay[:, t, :, None, None]
            if erase == "undecayed":
                value = value - k_[:, t].unsqueeze(2) @ S
            S *= fade
            if erase == "decayed":
                value = value - k_[:, t].unsqueeze(2) @ S
            S.addcmul_(k_[:, t].unsqueeze(-1), value * beta[:, t, :, None, None])
            outputs.append(q_[:, t] @ S)  # [B, HV, R, V]
        if state.dtype != dtype:
            state.copy_(S)
        return torch.stack(outputs, dim=1).view(B, T, max(HQ, HV), V).to(v.dtype)


def by_state(
    q: torch.Tensor, k: torch.Tensor, HV: int, scale: float, unit_length: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, T, HQ, K] times scale as [B, T, HV, R, K], the R rows that read a state in one product; k [B, T, HV, K]."""
    if unit_length:
        q, k = q * inverse_norm(q), k * inverse_norm(k)
    if q.shape[2] < HV:
        q = q.repeat_interleave(HV // q.shape[2], dim=2)
    if k.shape[2] < HV:
        k = k.repeat_interleave(HV // k.shape[2], dim=2)
    return q.unflatten(2, (HV, -1)) * scale, k
