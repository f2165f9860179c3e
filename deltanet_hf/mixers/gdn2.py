"""Gated DeltaNet-2 (arXiv 2605.22791): gates of its own for decay, erasing and writing, each per channel.

Per head, with a log decay g_t [K] <= 0, an erase gate b_t [K] and a write gate w_t [V],

    S_t = (I - k_t (b_t * k_t)^T) Diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; b = sigmoid(erase_proj(x)), w = sigmoid(write_proj(x)), and g is that of
`layer/channel_rule.py`. With b = w = beta in all channels of a head this is Kimi Delta Attention. With
`allow_neg_eigval` both gates go up to 2 (in the paper the erase gate alone), so that Kimi Delta Attention with that
setting is contained too.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.layer import ChannelRule, DeltaRule, MixCall, Projected, State
from deltanet_hf.mixers.layer.channel_rule import channel_rule
from deltanet_hf.mixers.layer.delta_rule import closed
from deltanet_kernels import gated_rms_norm

UNIT_EPS = 1e-6  # beside the squared length, as in the operators


class GatedDeltaNet2(ChannelRule):
    """The Gated DeltaNet-2 layer; see the module's docstring for the rule."""

    name: ClassVar[str] = "gdn2"
    title: ClassVar[str] = "Gated DeltaNet-2"
    without_lora: ClassVar[tuple[str, ...]] = ("f_down", "f_up", "share_proj")
    strengths = "other"

    def add_gates(self) -> None:
        super().add_gates()
        hidden, channels = self.q_proj.in_features, self.num_states * self.head_dim
        self.erase_proj = nn.Linear(hidden, channels, bias=self.settings.gate_bias)
        self.write_proj = nn.Linear(hidden, channels, bias=self.settings.gate_bias)

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay g and erase gate b [B, T, HV, K], write gate w [B, T, HV, V], float32; all 0 at padding."""
        x = projected.x
        logits = (closed(gate(x), padding) for gate in (self.erase_proj, self.write_proj))
        b, w = (self.strength(self.split_heads(gate)) for gate in logits)
        return self.channel_decay(x, padding), b, w

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        k, v, (g, b, w) = call.k, call.v, call.gates
        unit = unit_length(k)
        # 1, or nearly: the gates hold the strengths.
        strength = strength_of_rounded(unit, k) if self.settings.allow_neg_eigval else torch.ones_like(b[..., 0])
        mapped = call._replace(q=unit_length(call.q), k=unit, v=(w * v).to(v.dtype), gates=(g, strength))
        return channel_rule(mapped, self.settings.state_dtype, erase_key=(b * unit).to(k.dtype), unit_length=False)

    def take_over(self, scalar: DeltaRule) -> None:
        super().take_over(scalar)
        self.start_strengths(scalar)

    @torch.no_grad()
    def start_strengths(self, scalar: DeltaRule) -> None:
        """Take over the write strength per head of `scalar`, as both gates of all channels of a head."""
        for projection in (self.erase_proj, self.write_proj):
            projection.weight.copy_(scalar.b_proj.weight.repeat_interleave(self.head_dim, dim=0))
            if projection.bias is not None:
                projection.bias.copy_(scalar.b_proj.bias.repeat_interleave(self.head_dim))


@torch.no_grad()
def strength_of_rounded(unit: Tensor, k: Tensor) -> Tensor:
    """The strength [B, T, H] that a write needs because its unit key was rounded to the dtype of k; 1 without rounding.

    In bfloat16 a unit key [B, T, H, K] is up to .2% too long or too short. With erase gates of 2 and without this
    factor, each write of a key that is too long lets the state grow, to 10^5 times its size in 2,000 tokens.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    exact, rounded = (x.to(wide).square().sum(-1) for x in (unit_length(k.to(wide)), unit))
    return exact / rounded.clamp_min(torch.finfo(wide).tiny)


def unit_length(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6) over the last dimension, as RMSNorm with an equal weight."""
    size = x.shape[-1]
    weight = x.new_full((size,), size**-0.5, dtype=torch.promote_types(x.dtype, torch.float32))
    return gated_rms_norm(x, None, weight, UNIT_EPS / size)
