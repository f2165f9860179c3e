"""Plain PyTorch forms of the operators: the recurrence as the truth, the short convolution, the gated norm.

The gated delta rule (Gated Delta Networks, arXiv 2412.06464, equation 10), per state S [K, V]:

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T e^{g_t} S_{t-1})^T        o_t = scale * q_t^T S_t
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from deltanet_kernels import checks

L2_EPS = 1e-6


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x * rsqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def log_decay_and_strength(
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength [B, T, HV] in `dtype` from the raw logits (A_log given) or as they are."""
    g, beta = g.to(dtype), beta.to(dtype)
    if A_log is not None and dt_bias is not None:
        g = -A_log.to(dtype).exp() * F.softplus(g + dt_bias.to(dtype))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid()
    return g, beta


def naive_gated_delta_rule(
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
    """The recurrence, one token at a time, in the widest dtype among the inputs: the truth for tests.

    Arguments and results as `deltanet_kernels.chunk_gated_delta_rule`; slow, differentiable by autograd, and
    with float64 inputs exact to float64.
    """
    dims = checks.check_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, use_gate_in_kernel)
    dtype = torch.promote_types(torch.promote_types(q.dtype, g.dtype), beta.dtype)
    scale = dims.K**-0.5 if scale is None else scale
    g, beta = log_decay_and_strength(g, beta, A_log, dt_bias, use_beta_sigmoid_in_kernel, dtype)
    q_, k_, v_ = q.to(dtype), k.to(dtype), v.to(dtype)
    if use_qk_l2norm_in_kernel:
        q_, k_ = l2_normalize(q_), l2_normalize(k_)
    k_ = k_.repeat_interleave(dims.HV // dims.H, dim=2)
    q_ = q_.repeat_interleave(dims.HO // dims.HQ, dim=2) * scale
    queries_per_state = dims.HO // dims.HV

    decay = g.exp()

    # Rows, first state, first token and end of what runs together: the whole batch, or one packed sequence.
    if cu_seqlens is None:
        spans = [(slice(0, dims.B), 0, dims.T)]
    else:
        spans = [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))]

    outputs: list[torch.Tensor] = []  # per token [rows, HO, V]
    states: list[torch.Tensor] = []
    for rows, start, end in spans:
        state = v_.new_zeros(rows.stop - rows.start, dims.HV, dims.K, dims.V)
        if initial_state is not None:
            state = initial_state[rows].to(dtype)
        for t in range(start, end):
            state = state * decay[:, t, :, None, None]
            key = k_[:, t].unsqueeze(-1)  # [rows, HV, K, 1]
            delta = beta[:, t, :, None] * (v_[:, t] - (state * key).sum(-2))
            state = state + key * delta.unsqueeze(-2)
            heads = state.repeat_interleave(queries_per_state, dim=1) if queries_per_state > 1 else state
            outputs.append((heads * q_[:, t].unsqueeze(-1)).sum(-2))
        states.append(state)
    last = spans[-1][2]
    outputs += [v_.new_zeros(dims.B, dims.HO, dims.V)] * (dims.T - last)
    o = torch.stack(outputs, dim=1).to(v.dtype)
    return o, torch.cat(states) if output_final_state else None


def torch_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution in plain PyTorch, float32 inside (float64 for float64 inputs).

    Every sequence is laid out behind the W-1 inputs that precede it, so that one sum over W shifted views
    serves the batched and the packed form. Arguments and results as `deltanet_kernels.causal_conv1d`.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    past = x.new_zeros(N, D, W - 1) if initial_state is None else initial_state.to(x.dtype)
    past = past.transpose(1, 2)  # [N, W-1, D]

    if cu_seqlens is None:
        extended = torch.cat([past, x], dim=1)  # [B, W-1+T, D]
        final = extended[:, T:].transpose(1, 2) if output_final_state else None
        y = _shifted_sum(extended.to(dtype), weight.to(dtype), bias, activation)
    else:
        pool = torch.cat([x[0], past.reshape(-1, D)])  # T tokens, then the N*(W-1) rows of the past
        order: list[int] = []
        outputs: list[int] = []
        tails: list[int] = []
        bounds = cu_seqlens.tolist()
        for n, (start, end) in enumerate(pairwise(bounds)):
            first = T + n * (W - 1)
            outputs.extend(range(len(order), len(order) + end - start))
            order.extend(range(first, first + W - 1))
            order.extend(range(start, end))
            tails.extend(order[len(order) - (W - 1) :])
        index = torch.tensor(order, dtype=torch.long, device=x.device)
        packed = pool.index_select(0, index).unsqueeze(0)
        summed = _shifted_sum(packed.to(dtype), weight.to(dtype), bias, activation)[0]
        keep = torch.tensor(outputs, dtype=torch.long, device=x.device)
        y = F.pad(summed.index_select(0, keep), (0, 0, 0, T - len(outputs))).unsqueeze(0)
        final = None
        if output_final_state:
            tail = torch.tensor(tails, dtype=torch.long, device=x.device)
            final = pool.index_select(0, tail).view(N, W - 1, D).transpose(1, 2)
    if final is not None:
        final = final.contiguous()
    return y.to(x.dtype), final


def _shifted_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """y[:, t] = activation(sum_w weight[:, w] x[:, t+w] + bias); x [B, T+W-1, D] -> [B, T, D]."""
    W = weight.shape[1]
    T = x.shape[1] - W + 1
    taps = weight.t().contiguous()  # [W, D]; a strided factor halves the speed
    y = x[:, :T] * taps[0]
    for w in range(1, W):
        y.addcmul_(x[:, w : w + T], taps[w])
    if bias is not None:
        y += bias.to(y.dtype)
    return F.silu(y) if activation == "silu" else y


def torch_gated_rms_norm(x: torch.Tensor, z: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rmsnorm(x) * weight * silu(z) in plain PyTorch, float32 inside (float64 for float64 inputs)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(dtype), x.shape[-1:], eps=eps) * weight.to(dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype)
