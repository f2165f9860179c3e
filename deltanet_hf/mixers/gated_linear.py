"""Gated linear attention with one decay per head: Gated DeltaNet without erasing.

    S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; g = -exp(A_log) softplus(a_proj(x) + dt_bias) and beta = sigmoid(b_proj(x)), as in Gated
DeltaNet. The recurrence is that of Mamba-2 (arXiv 2405.21060), whose write strength is the step of its decay
(softplus(a + dt_bias)) and whose q and k are not normalised.
"""

from __future__ import annotations

from typing import ClassVar

from deltanet_hf.mixers.layer import AdditiveSettings, DeltaRule, MixerProjections


class GatedLinear(DeltaRule):
    """The layer of gated linear attention; see the module's docstring for the rule."""

    name: ClassVar[str] = "gated_linear"
    title: ClassVar[str] = "gated linear attention"
    Settings: ClassVar[type[MixerProjections]] = AdditiveSettings
    erase = "off"
    is_gated_delta_rule = True
