"""Gated linear attention (arXiv 2312.06635): a decay per key channel, and nothing is erased.

Per head, with a log decay g_t [K] <= 0 and a write strength beta_t,

    S_t = Diag(exp(g_t)) S_{t-1} + k_t beta_t v_t^T        o_t = D^-0.5 q_t^T S_t

The gate is that of `channel_decay.py`, which contains the published one, log sigmoid(y) / 16, and also a decay fitted
per head. The paper writes with strength 1; here beta = sigmoid(b_proj(x)), as in Gated DeltaNet, so that a token can
leave the state alone. q and k have unit length, which the paper does not require.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from deltanet_hf.mixers.additive import AdditiveSettings
from deltanet_hf.mixers.attention_shape import MixerProjections
from deltanet_hf.mixers.channel_decay import channel_rule
from deltanet_hf.mixers.kda import KimiDeltaAttention
from deltanet_hf.mixers.state import State


class GatedLinearAttention(KimiDeltaAttention):
    """The gated linear attention layer: Kimi Delta Attention without erasing."""

    name: ClassVar[str] = "gla"
    title: ClassVar[str] = "Gated linear attention"
    Settings: ClassVar[type[MixerProjections]] = AdditiveSettings

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
        return channel_rule(q, k, v, g, beta, state, keep_state, cu_seqlens, self.settings.state_dtype, erase=False)
