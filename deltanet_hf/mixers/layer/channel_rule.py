"""The base of the rules with a decay per key channel, from a low-rank projection.

    g = -exp(A_log) softplus(f_up(f_down(x)) + dt_bias)

A_log is one number per state and dt_bias one per channel, as in Kimi Delta Attention (arXiv 2510.26692). The gate of
gated linear attention (arXiv 2312.06635), log sigmoid(y) / 16, is this one with exp(A_log) = 1/16 and y = -x.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.delta_rule import DeltaRule, closed, stored, wide
from deltanet_hf.mixers.layer.layer_call import MixCall, Projected
from deltanet_hf.mixers.layer.parts import DecayGate, Part
from deltanet_kernels import chunk_channel_gated_delta_rule, fused_recurrent_channel_gated_delta_rule


class ChannelDecayGate(Part):
    """Log decay per key channel: g = -exp(A_log) * softplus(f + dt_bias), all in float32."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start of training from scratch: that of `DecayGate`, with steps that are spread over the channels."""
        heads, head_dim = self.dt_bias.shape
        scalar = DecayGate(heads)
        steps = torch.logspace(-3, -1, head_dim).expm1().log()
        with torch.no_grad():
            self.A_log.copy_(scalar.A_log)
            self.dt_bias.copy_(steps.expand(heads, head_dim))

    def forward(self, f: Tensor) -> Tensor:
        """f [B, T, HV, K] -> g [B, T, HV, K] float32, <= 0."""
        return -self.A_log.float().exp().unsqueeze(-1) * F.softplus(f.float() + self.dt_bias.float())


def gate_rank(states: int, head_dim: int) -> int:
    """Rank of the projection: the head size as published, and at least one per state, which a decay per head takes."""
    return max(states, head_dim)


class ChannelRule(DeltaRule):
    """A mixer whose state decays per key channel; a rule says by `erase` whether a write erases."""

    without_lora: ClassVar[tuple[str, ...]] = ("f_down", "f_up", "b_proj", "share_proj")
    decays = "by channel"

    def add_gates(self) -> None:
        hidden, rank = self.q_proj.in_features, gate_rank(self.num_states, self.head_dim)
        self.f_down = nn.Linear(hidden, rank, bias=False)
        self.f_up = nn.Linear(rank, self.num_states * self.head_dim, bias=False)
        if self.strengths == "sigmoid":
            self.b_proj = nn.Linear(hidden, self.num_states, bias=self.settings.gate_bias)
        self.decay = ChannelDecayGate(self.num_states, self.head_dim)

    def channel_decay(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Log decay g [B, T, HV, K] float32; 0 at padding."""
        return self.decay(self.split_heads(closed(self.f_up(self.f_down(x)), padding)))

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay g [B, T, HV, K] and write strength beta [B, T, HV], float32; both 0 at padding."""
        return self.channel_decay(projected.x, padding), self.strength(closed(projected.b, padding))

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        return channel_rule(call, self.settings.state_dtype, erase=self.erase != "off")

    @torch.no_grad()
    def take_over(self, scalar: DeltaRule) -> None:
        """Become `scalar`, a layer with a decay per head, which all channels of a head take.

        The first rows of the low-rank projection are the scalar projection, and the further ones begin with no effect.
        """
        own = dict(self.named_parameters())
        for name, value in scalar.named_parameters():
            if name in own and not name.startswith("decay."):
                own[name].copy_(value)
        states, size = self.num_states, self.head_dim
        nn.init.normal_(self.f_down.weight, std=float(scalar.a_proj.weight.std()) or 1.0)
        self.f_down.weight[:states] = scalar.a_proj.weight
        self.f_up.weight.zero_()
        self.f_up.weight[:, :states] = torch.eye(states).repeat_interleave(size, dim=0)
        self.decay.A_log.copy_(scalar.decay.A_log)
        self.decay.dt_bias.copy_(scalar.decay.dt_bias.unsqueeze(-1).expand(states, size))


def channel_rule(
    call: MixCall, state_dtype: str, *, erase_key: Tensor | None = None, erase: bool = True, unit_length: bool = True
) -> tuple[Tensor, State]:
    """The delta rule with a decay per channel on a mixer's state: gates (g [B, T, HV, K], beta [B, T, HV]).

    By default q and k are brought to unit length. The new state is rounded to bfloat16 if `state_dtype` says so.
    """
    g, beta = call.gates
    rule = fused_recurrent_channel_gated_delta_rule if call.decodes else chunk_channel_gated_delta_rule
    output, new_state = rule(
        call.q,
        call.k,
        call.v,
        g,
        beta,
        erase_key,
        erase,
        initial_state=None if call.state is None else wide(call.state["state"], call.q),
        output_final_state=call.keep_state,
        use_qk_l2norm_in_kernel=unit_length,
        cu_seqlens=call.cu_seqlens,
    )
    return output, stored(new_state, state_dtype)
