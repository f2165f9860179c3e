"""The gated delta rule token by token in plain PyTorch: decoding on CPU, a handful of operations a token."""

import torch

from deltanet_kernels import checks
from deltanet_kernels.reference import log_decay_and_strength
from deltanet_kernels.torch_chunk import no_autocast, torch_chunk_gated_delta_rule
from deltanet_kernels.torch_chunk_forward import inverse_norm

# Up to this many tokens the recurrence is faster than one chunk.
MAX_STEPS = 8


def torch_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence in float32 (float64 for float64 inputs); differentiable.

    Long, packed or differentiated inputs go through the chunked form, which computes the same thing faster.
    Arguments, results and errors as `deltanet_kernels.fused_recurrent_gated_delta_rule`.
    """
    inputs = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if needs_grad or cu_seqlens is not None or q.shape[1] > MAX_STEPS:
        return torch_chunk_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
            A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        )  # fmt: skip
    dims = checks.check_delta_rule(q, k, v, g, beta, initial_state, None, A_log, dt_bias, use_gate_in_kernel)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if initial_state is None:
        state = torch.zeros(dims.B, dims.HV, dims.K, dims.V, dtype=dtype, device=q.device)
    else:
        state = initial_state.clone()
    o = torch_recurrent_step_(
        q, k, v, g, beta, state, scale, use_qk_l2norm_in_kernel, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
    )  # fmt: skip
    return o, state if output_final_state else None


def torch_recurrent_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
) -> torch.Tensor:
    """The recurrence with the state [B, HV, K, V] in place; A_log and dt_bias given, g is the raw gate logit."""
    (B, T, HQ, K), H, (HV, V) = q.shape, k.shape[2], v.shape[2:]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = K**-0.5 if scale is None else scale
    with no_autocast(q.device):
        g, beta = log_decay_and_strength(g, beta, A_log, dt_bias, use_beta_sigmoid_in_kernel, dtype)
        q_, k_, v_ = q.to(dtype), k.to(dtype), v.to(dtype)
        if use_qk_l2norm_in_kernel:
            q_, k_ = q_ * inverse_norm(q_), k_ * inverse_norm(k_)
        if HQ < HV:
            q_ = q_.repeat_interleave(HV // HQ, dim=2)
        if H < HV:
            k_ = k_.repeat_interleave(HV // H, dim=2)
        # One product per token: rows of q share the state of their group, [B, T, HV, R, K].
        q_ = q_.unflatten(2, (HV, -1)) * scale
        decay = g.exp()
        S = state.to(dtype)
        outputs = []
        for t in range(T):
            S *= decay[:, t, :, None, None]
            key = k_[:, t].unsqueeze(2)  # [B, HV, 1, K]
            delta = (v_[:, t].unsqueeze(2) - key @ S) * beta[:, t, :, None, None]
            S.addcmul_(key.transpose(-1, -2), delta)
            outputs.append(q_[:, t] @ S)  # [B, HV, R, V]
        if state.dtype != dtype:
            state.copy_(S)
        return torch.stack(outputs, dim=1).view(B, T, max(HQ, HV), V).to(v.dtype)
