"""DeltaNet (arXiv 2102.11174; in chunks, arXiv 2406.06484): the delta rule without decay.

Per head, with a write strength beta_t:

    S_t = S_{t-1} + k_t beta_t (v_t - k_t^T S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length and beta = sigmoid(b_proj(x)), up to 2 with `allow_neg_eigval`. This is Gated DeltaNet with
g = 0. With beta = 1 a read of the last key returns its value; nothing is forgotten except by writing over it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.gated_deltanet import CLOSED_GATE, GatedDeltaNet


class DeltaNet(GatedDeltaNet):
    """The DeltaNet layer; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "deltanet"
    title: ClassVar[str] = "DeltaNet"

    def add_gates(self) -> None:
        self.a_proj = self.decay = None
        self.b_proj = nn.Linear(self.q_proj.in_features, self.num_states, bias=self.settings.gate_bias)

    def gates(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay 0 and write strength beta, both [B, T, HV] float32; beta is 0 at padding."""
        b = self.b_proj(x)
        if padding is not None:
            b = b.masked_fill(padding.unsqueeze(-1), CLOSED_GATE)
        beta = self.strength(b)
        return torch.zeros_like(beta), beta

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = self.b_proj(x)
        return torch.zeros_like(b), b

    def decay_parameters(self) -> tuple[Tensor, Tensor]:
        """A decay rate of exp(A_log) = 0."""
        closed = torch.full((self.num_states,), -torch.inf, device=self.b_proj.weight.device)
        return closed, torch.zeros_like(closed)
