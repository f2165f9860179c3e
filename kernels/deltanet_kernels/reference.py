"""The operators around a rule in plain PyTorch: the CPU path, and the reference for the kernels."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from deltanet_kernels.arguments import ConvCall, GatedNormCall, RMSNormCall, SiluProductCall


def torch_causal_conv1d(call: ConvCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.causal_conv1d` in plain PyTorch, float32 inside (float64 for float64 inputs).

    Every sequence is placed after the W-1 inputs that precede it, so that one sum over W shifted views computes
    the batched and the packed form.
    """
    x, weight, bias, activation, initial_state, output_final_state, cu_seqlens = call
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


def torch_gated_rms_norm(call: GatedNormCall) -> torch.Tensor:
    """`deltanet_kernels.gated_rms_norm` in plain PyTorch, float32 inside (float64 for float64 inputs)."""
    x, z, weight, eps = call
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = F.rms_norm(x.to(dtype), x.shape[-1:], eps=eps) * weight.to(dtype)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype)


def torch_rms_norm(call: RMSNormCall) -> torch.Tensor:
    """`deltanet_kernels.rms_norm` in plain PyTorch."""
    x, weight, eps, offset, round_first, residual, total = call
    if residual is not None:
        x = torch.add(x, residual, out=total)
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        return weight * normed.to(x.dtype)
    return (normed * (offset + weight.to(torch.float32))).to(x.dtype)


def torch_silu_product(call: SiluProductCall) -> torch.Tensor:
    """`deltanet_kernels.silu_product` in plain PyTorch."""
    return F.silu(call.gate) * call.up
