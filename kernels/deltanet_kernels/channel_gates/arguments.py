"""The arguments of the rule with a decay per channel as one typed object."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deltanet_kernels.arguments import RuleDims


class ChannelCall(NamedTuple):
    """One call of the rule; `deltanet_kernels.chunk_channel_gated_delta_rule` documents the fields."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    erase_key: torch.Tensor | None = None
    erase: bool = True
    initial_state: torch.Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: torch.Tensor | None = None
    scale: float | None = None

    @property
    def factor(self) -> float:
        """The factor of the output: `scale`, or K**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)

    @property
    def dims(self) -> RuleDims:
        """Sizes of checked arguments."""
        (B, T, HQ, K), H, (HV, V) = self.q.shape, self.k.shape[2], self.v.shape[2:]
        N = B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return RuleDims(B, T, H, HQ, HV, max(HQ, HV), K, V, N)

    def needs_gradients(self) -> bool:
        """Whether autograd records this call."""
        inputs = (self.q, self.k, self.v, self.g, self.beta, self.erase_key, self.initial_state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
