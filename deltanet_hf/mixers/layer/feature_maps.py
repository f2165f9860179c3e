"""Feature maps of linear attention with a normaliser: phi(q)^T phi(k) is positive for all q and k."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer.parts import Part


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1 (arXiv 2006.16236), in the shape and dtype of x."""
    return F.elu(x) + 1


def taylor_features(x: Tensor) -> Tensor:
    """x [..., d] -> [..., 1 + d + d(d+1)/2], with phi(q)^T phi(k) = 1 + s + s^2 / 2 >= 1/2 for s = q^T k."""
    row, column = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    factor = torch.ones(len(row), dtype=x.dtype, device=x.device).masked_fill(row == column, 0.5**0.5)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., row] * x[..., column] * factor], dim=-1)


def taylor_size(d: int) -> int:
    """The number of features of d inputs."""
    return 1 + d + d * (d + 1) // 2


class TaylorFeatures(Part):
    """Linear maps of q and k to d channels per head, and the features of exp to second order (arXiv 2402.18668).

    `q_map` [HQ, D, d] and `k_map` [HK, D, d]; softmax's scores q^T k / sqrt(D) are approximated by those of the maps.
    """

    def __init__(self, query_heads: int, key_heads: int, head_dim: int, d: int) -> None:
        super().__init__()
        self.q_map = nn.Parameter(torch.empty(query_heads, head_dim, d))
        self.k_map = nn.Parameter(torch.empty(key_heads, head_dim, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The first d channels, each divided by D^(1/4)."""
        with torch.no_grad():
            for weight in (self.q_map, self.k_map):
                weight.copy_(torch.eye(*weight.shape[1:], device=weight.device) * weight.shape[1] ** -0.25)

    @torch.no_grad()
    def adapt(self, q: Tensor, k: Tensor) -> None:
        """Sets the maps for queries [n, T, HQ, D] and keys [n, T, HK, D]: principal channels, mean square score 1.

        A head keeps the leading directions of its queries and keys together, each of them scaled to unit size.
        """
        HK, d = self.k_map.shape[0], self.k_map.shape[2]
        q_KND = q.flatten(0, 1).unflatten(1, (HK, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        k_KND = k.flatten(0, 1).transpose(0, 1)
        moments = [x.mT @ x / x.square().sum((1, 2))[:, None, None].clamp_min(1e-30) for x in (q_KND, k_KND)]
        leading = torch.linalg.eigh(moments[0] + moments[1]).eigenvectors[..., -d:]  # [HK, D, d]
        second = [(x @ leading).mT @ (x @ leading) / x.shape[1] for x in (q_KND, k_KND)]
        score = torch.einsum("hij,hij->h", *second).clamp_min(1e-30)  # mean square over pairs of tokens
        weight = leading * score[:, None, None] ** -0.25
        self.k_map.copy_(weight)
        self.q_map.copy_(weight.repeat_interleave(self.q_map.shape[0] // HK, dim=0))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, HQ, D], k [B, T, HK, D] -> their features, [B, T, heads, 1 + d + d(d+1)/2]."""
        mapped = (
            torch.einsum("bthd,hde->bthe", x, weight.to(x.dtype)) for x, weight in ((q, self.q_map), (k, self.k_map))
        )
        features_q, features_k = (taylor_features(x) for x in mapped)
        return features_q, features_k
