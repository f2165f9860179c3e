"""The steps behind a prompt's attention, in PyTorch: the mixture with a state's output, and the decoding cache."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deltanet_kernels.arguments import GatedNormCall
from deltanet_kernels.reference import torch_gated_rms_norm
from deltanet_kernels.window.calls import WindowKeepCall, WindowMixtureCall


def torch_window_mixture(call: WindowMixtureCall) -> torch.Tensor:
    """`deltanet_kernels.window_mixture` in PyTorch, with every result between two operations rounded to its dtype."""
    window_output, lse, state_output, share_logit, far_slope, near_slope = call[:6]
    places, reach, numbers, z, norm_weight, eps, edge = call[6:]
    if before := window_output.shape[1] - state_output.shape[1]:
        state_output = F.pad(state_output, (0, 0, 0, 0, before, 0))
    if norm_weight is not None:
        state_output = torch_gated_rms_norm(GatedNormCall(state_output, z, norm_weight, eps))
    elif z is not None:
        state_output = state_output * F.silu(z)
    if numbers is None:
        numbers = torch.arange(1, window_output.shape[1] + 1, device=window_output.device)[None]
    seen = numbers if reach is None else numbers.clamp_max(reach)
    unseen = (seen - places - (numbers - 1) % edge).clamp_min(0)
    slopes = far_slope.float() * unseen.clamp_min(1).float().log().unsqueeze(-1) - near_slope.float() * lse
    share = ((share_logit.float() + slopes).sigmoid() * (unseen > 0).unsqueeze(-1)).unsqueeze(-1)
    return window_output + share.to(window_output.dtype) * (state_output.to(window_output.dtype) - window_output)


def torch_window_keep(call: WindowKeepCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_keep` in PyTorch."""
    k, v, window, sinks, length = call
    B, T = k.shape[:2]
    end = torch.full((1,), T, device=k.device) if length is None else length
    place = torch.arange(window + sinks, device=k.device)
    last = end - (end + sinks - place) % window
    number = torch.where(place < sinks, place + 1, torch.where(last > sinks, last, 0))
    number = torch.where(number <= end, number, 0)
    kept = [
        x[:, (number - 1).clamp_min(0)].masked_fill((number == 0)[:, None, None], 0).transpose(1, 2) for x in (k, v)
    ]
    return kept[0].contiguous(), kept[1].contiguous(), number.int().repeat(B, 1), end.int().repeat(B)
