"""Rules that add to a state and never erase from it, by the gated delta rule without its erase term.

S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T        o_t = D^-0.5 q_t^T S_t
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltanet_hf.mixers.attention_shape import MixerProjections
from deltanet_hf.mixers.gated_deltanet import delta_rule
from deltanet_hf.mixers.state import State


@dataclass(frozen=True)
class AdditiveSettings(MixerProjections):
    """Settings of the rules that erase nothing."""

    def validate(self, where: str) -> None:
        super().validate(where)
        if self.allow_neg_eigval:
            raise ValueError(f"{where}.allow_neg_eigval: got true, but this rule erases nothing; leave it out")


def additive_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: State | None,
    keep_state: bool,
    cu_seqlens: Tensor | None,
    recurrent: bool,
    state_dtype: str,
    unit_length: bool = True,
) -> tuple[Tensor, State]:
    """The rule above; arguments as in `delta_rule`."""
    return delta_rule(q, k, v, g, beta, state, keep_state, cu_seqlens, recurrent, state_dtype, unit_length, "off")


def wide_range(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """q, k and v in a dtype with the range of float32, for values scaled by large factors, and the dtype they had."""
    if v.dtype == torch.float16:
        return q.float(), k.float(), v.float(), v.dtype
    return q, k, v, v.dtype
