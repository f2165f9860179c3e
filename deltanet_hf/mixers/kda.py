"""Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet with a decay per key channel.

Per head, with a log decay g_t [K] <= 0 and a write strength beta_t,

    S_t = Diag(exp(g_t)) S_{t-1} + k_t beta_t (v_t - k_t^T Diag(exp(g_t)) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; beta = sigmoid(b_proj(x)) and g = -exp(A_log) softplus(f_up(f_down(x)) + dt_bias), with one
A_log per head and one dt_bias per channel. Equal channels are Gated DeltaNet. What surrounds the rule is the project's
(`Mixer`): the output gate is SiLU of a full projection, where the paper has the sigmoid of one of low rank.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.attention_shape import MixerProjections
from deltanet_hf.mixers.channel_decay import ChannelDecayGate, channel_rule, gate_rank
from deltanet_hf.mixers.gated_deltanet import CLOSED_GATE, GatedDeltaNet
from deltanet_hf.mixers.state import State


class KimiDeltaAttention(GatedDeltaNet):
    """The Kimi Delta Attention layer; see the module's docstring for the rule."""

    name: ClassVar[str] = "kda"
    title: ClassVar[str] = "Kimi Delta Attention"
    without_lora: ClassVar[tuple[str, ...]] = ("f_down", "f_up", "b_proj", "share_proj")

    fused_step = False  # it decays per head

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixerProjections:
        if profile == "qwen3_5":
            raise ValueError("profile: got qwen3_5, whose layer decays per head; take the mixer gated_deltanet")
        return super().default_settings(profile, training)

    def add_gates(self) -> None:
        hidden, rank = self.q_proj.in_features, gate_rank(self.num_states, self.head_dim)
        self.f_down = nn.Linear(hidden, rank, bias=False)
        self.f_up = nn.Linear(rank, self.num_states * self.head_dim, bias=False)
        self.b_proj = nn.Linear(hidden, self.num_states, bias=self.settings.gate_bias)
        self.decay = ChannelDecayGate(self.num_states, self.head_dim)  # type: ignore[assignment]

    def channel_decay(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Log decay g [B, T, HV, K] float32; 0 at padding."""
        f = self.f_up(self.f_down(x))
        if padding is not None:
            f = f.masked_fill(padding.unsqueeze(-1), CLOSED_GATE)
        return self.decay(self.split_heads(f))

    def gates(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay g [B, T, HV, K] and write strength beta [B, T, HV], float32; both 0 at padding."""
        b = self.b_proj(x)
        if padding is not None:
            b = b.masked_fill(padding.unsqueeze(-1), CLOSED_GATE)
        return self.channel_decay(x, padding), self.strength(b)

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: tuple[Tensor, ...],
        state: State | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State]:
        g, beta = gates
        return channel_rule(q, k, v, g, beta, state, keep_state, cu_seqlens, self.settings.state_dtype)

    @torch.no_grad()
    def start_decay(self, scalar: GatedDeltaNet) -> None:
        """Take over the decay per head of `scalar`, equal in all channels of a head.

        The first rows of the low-rank projection are the scalar projection, and the further ones begin with no effect.
        """
        states, size = self.num_states, self.head_dim
        nn.init.normal_(self.f_down.weight, std=float(scalar.a_proj.weight.std()) or 1.0)
        self.f_down.weight[:states] = scalar.a_proj.weight
        self.f_up.weight.zero_()
        self.f_up.weight[:, :states] = torch.eye(states).repeat_interleave(size, dim=0)
        self.decay.A_log.copy_(scalar.decay.A_log)
        self.decay.dt_bias.copy_(scalar.decay.dt_bias.unsqueeze(-1).expand(states, size))
