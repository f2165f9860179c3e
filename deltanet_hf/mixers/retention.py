"""Retention (RetNet, arXiv 2307.08621): a state with one constant decay per head.

    S_t = exp(g) S_{t-1} + k_t v_t^T        o_t = D^-0.5 q_t^T S_t        g = -ln 2 / half-life

With the rotary embedding on q and k this is a state of complex numbers whose decay is exp(g + i theta). The half-life
of each head is learned; RetNet fixes it, and does not bring q and k to unit length as this layer does.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.layer import AdditiveSettings, DeltaRule, MixerProjections, Part, Projected
from deltanet_hf.mixers.layer.window_branch import WindowBranch


class ConstantDecay(Part):
    """Constant log decay per head: g = -ln 2 / exp(log_half_life), in float32; half-lives in tokens."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_half_life = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """RetNet's decays: factors 1 - 2^(-5 - head)."""
        heads = torch.arange(self.log_half_life.numel(), device=self.log_half_life.device)
        with torch.no_grad():
            self.log_half_life.copy_((-math.log(2) / torch.log1p(-torch.exp2(-5.0 - heads))).log())

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] -> g [B, T, HV] float32, < 0."""
        return (-math.log(2) * (-self.log_half_life.float()).exp()).expand(*x.shape[:2], -1)


class Retention(DeltaRule):
    """The retention layer; see the module's docstring for the rule."""

    name: ClassVar[str] = "retention"
    title: ClassVar[str] = "retention"
    Settings: ClassVar[type[MixerProjections]] = AdditiveSettings
    decays = "by head"
    strengths = "one"
    erase = "off"
    is_gated_delta_rule = True
    fp32: ClassVar[tuple[str, ...]] = ("log_half_life", *WindowBranch.FP32)

    def add_gates(self) -> None:
        self.decay = ConstantDecay(self.num_states)

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay g and write strength 1, both [B, T, HV] float32; both 0 at padding."""
        g = self.decay(projected.x)
        beta = torch.ones_like(g)
        if padding is not None:
            g, beta = (gate.masked_fill(padding.unsqueeze(-1), 0.0) for gate in (g, beta))
        return g, beta
