"""Gated DeltaNet (Gated Delta Networks, arXiv 2412.06464, eq. 10).

Per head, with a log decay g_t <= 0 and a write strength beta_t:

    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; beta = sigmoid(b_proj(x)) and g = -exp(A_log) softplus(a_proj(x) + dt_bias). The state's
output is RMSNorm(o) * weight * silu(g_proj(x)), norm and gate where the settings have them; a window, if there is one,
is mixed in before o_proj.

With `allow_neg_eigval`, beta = 2 sigmoid(b_proj(x)): the factors I - beta k k^T then have eigenvalues down to -1, which
tracking a state requires (arXiv 2411.12537). The strength may be exactly 2, because a smaller cap forgets: with 1.992,
a value that every token turns round has .61 of its size after 64 tokens, and nothing of it is left after 1,024. With 2
it keeps its size, because the operator brings k to a length just below 1: on a CPU, 8,192 reflections at one key
changed the norm by at most .6% in float32 and in bfloat16.
"""

from __future__ import annotations

from typing import Any, ClassVar

from deltanet_hf.mixers.layer import DeltaRule, MixerProjections

QWEN3_5: dict[str, Any] = {
    "expand_kv": True,
    "rope": False,
    "qk_norm": False,
    "qkv_bias": False,
    "conv_size": 4,
    "qk_activation": "silu",
    "v_activation": "silu",
    "output_norm": "shared",
    "output_gate": True,
    "gate_bias": False,
}  # the layer of Qwen3.5's text models


class GatedDeltaNet(DeltaRule):
    """The Gated DeltaNet layer: gates and rule are those of `DeltaRule` (layer/delta_rule.py), the rest is `Mixer`."""

    name: ClassVar[str] = "gated_deltanet"
    title: ClassVar[str] = "Gated DeltaNet"
    is_gated_delta_rule = True

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixerProjections:
        return cls.Settings(**QWEN3_5) if profile == "qwen3_5" else super().default_settings(profile, training)
