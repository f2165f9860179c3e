"""Rotary embedding in PyTorch, as the decoding steps define it."""

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864) of the first R channels of x [B, T, H, K].

    Channel i < R/2 is rotated against channel i + R/2; cos and sin are [B or 1, T, R].
    """
    turning, rest = x.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos.unsqueeze(2) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1) if rest.shape[-1] else turned.to(x.dtype)


def turned(q: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Queries [B, T, HQ, D] that are rotated, turned on by cos and sin [B or 1, T, R], in float32 at least."""
    return rotate(q.to(torch.promote_types(q.dtype, torch.float32)), *turn).to(q.dtype)
