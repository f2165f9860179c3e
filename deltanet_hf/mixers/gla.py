"""Gated linear attention (arXiv 2312.06635): a decay per key channel, and nothing is erased.

Per head, with a log decay g_t [K] <= 0 and a write strength beta_t,

    S_t = Diag(exp(g_t)) S_{t-1} + k_t beta_t v_t^T        o_t = D^-0.5 q_t^T S_t

The gate is that of `layer/channel_rule.py`, which contains the published one, log sigmoid(y) / 16, and also a decay
fitted per head. The paper writes with strength 1; here beta = sigmoid(b_proj(x)), as in Gated DeltaNet, so that a token
can leave the state alone. q and k have unit length, which the paper does not require.
"""

from __future__ import annotations

from typing import ClassVar

from deltanet_hf.mixers.layer import AdditiveSettings, ChannelRule, MixerProjections


class GatedLinearAttention(ChannelRule):
    """The gated linear attention layer: Kimi Delta Attention without erasing."""

    name: ClassVar[str] = "gla"
    title: ClassVar[str] = "gated linear attention (decay per channel)"
    Settings: ClassVar[type[MixerProjections]] = AdditiveSettings
    erase = "off"
