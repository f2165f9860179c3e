"""Attention with linear biases (ALiBi, arXiv 2108.12409), beside the rotary embedding and with slopes that are trained.

Per query head, with one slope >= 0,

    o_t = sum over s <= t of softmax_s(scale q_t . k_s - slope (t - s)) v_s

where t - s counts the tokens that are not padding. It is forgetting attention with the constant log f = -slope. The
paper's slopes are fixed, 2^(-8 h / H) for h = 1 .. H; here they start at 0, the teacher's attention.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from deltanet_hf.mixers.attention.decay_bias import DecayBias
from deltanet_hf.mixers.layer.parts import Opening


class LinearBiasAttention(DecayBias):
    """Softmax attention with linear biases; see the module's docstring. `slope.opening` [HQ] are the slopes."""

    name: ClassVar[str] = "alibi"
    title: ClassVar[str] = "attention with linear biases"

    slope: Opening

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.slope = Opening(query_heads)

    def new_parts(self) -> list[nn.Module]:
        return [self.slope]

    def start_neutral(self, spread: float) -> None:
        self.slope.reset_parameters()

    def log_decay(self, x: Tensor) -> Tensor:
        return -self.slope().expand(*x.shape[:2], -1)
