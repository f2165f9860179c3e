"""Forgetting attention (FoX, the Forgetting Transformer, arXiv 2503.02130): softmax attention with a forget gate.

Per query head, with f_t in (0, 1] computed from the layer's input and F_t = log f_1 + ... + log f_t,

    o_t = sum over s <= t of softmax_s(scale q_t . k_s + F_t - F_s) v_s

The gate is log f_t = -opening * softplus(-f_proj(x_t)) with one opening >= 0 per head. At opening 0 nothing is
forgotten, which is the teacher's attention; at 1 it is the paper's f_t = sigmoid(f_proj(x_t)). The rotary embedding,
which the paper leaves out, stays.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.attention.decay_bias import DecayBias
from deltanet_hf.mixers.layer.parts import Opening


class ForgetGate(nn.Module):
    """log f [B, T, H] <= 0, float32 or float64, from the layer's input x [B, T, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.f_proj = nn.Linear(hidden, heads)
        self.opening = Opening(heads)

    def forward(self, x: Tensor) -> Tensor:
        opening = self.opening()
        return -opening * F.softplus(-self.f_proj(x).to(opening.dtype))


class ForgettingAttention(DecayBias):
    """Softmax attention with a forget gate; see the module's docstring."""

    name: ClassVar[str] = "fox"
    title: ClassVar[str] = "forgetting attention"
    without_lora: ClassVar[tuple[str, ...]] = ("f_proj",)  # one output per head

    forget: ForgetGate

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.forget = ForgetGate(hidden, query_heads)

    def new_parts(self) -> list[nn.Module]:
        return [self.forget]

    def start_neutral(self, spread: float) -> None:
        """The opening has a gradient; the gate's projection has one as soon as the opening is above 0."""
        self.forget.opening.reset_parameters()
        nn.init.zeros_(self.forget.f_proj.weight)
        nn.init.zeros_(self.forget.f_proj.bias)

    def log_decay(self, x: Tensor) -> Tensor:
        return self.forget(x)  # type: ignore[no-any-return]
