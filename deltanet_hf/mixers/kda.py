"""Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet with a decay per key channel.

Per head, with a log decay g_t [K] <= 0 and a write strength beta_t,

    S_t = Diag(exp(g_t)) S_{t-1} + k_t beta_t (v_t - k_t^T Diag(exp(g_t)) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; beta = sigmoid(b_proj(x)) and g = -exp(A_log) softplus(f_up(f_down(x)) + dt_bias), with one
A_log per head and one dt_bias per channel. Equal channels are Gated DeltaNet. What surrounds the rule is the project's
(`Mixer`): the output gate is SiLU of a full projection, where the paper has the sigmoid of one of low rank.
"""

from __future__ import annotations

from typing import ClassVar

from deltanet_hf.mixers.layer import ChannelRule


class KimiDeltaAttention(ChannelRule):
    """The Kimi Delta Attention layer; see the module's docstring for the rule."""

    name: ClassVar[str] = "kda"
    title: ClassVar[str] = "Kimi Delta Attention"
