"""Comba (arXiv 2506.02475): the delta rule with its prediction from the state before the decay.

Per head, with a log decay g_t <= 0, a write strength eta_t and a feedback factor f:

    S_t = exp(g_t) S_{t-1} + k_t eta_t (v_t - f k_t^T S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; before that, q is corrected by the key: q <- q - d f k. g and eta = sigmoid(b_proj(x)) are
those of Gated DeltaNet; f = sigmoid(feedback) and d are learned, one per head. Where eta f exceeds exp(g), the
eigenvalue exp(g) - eta f is negative, which Gated DeltaNet reaches by `allow_neg_eigval` only. With that setting, eta
is 2 sigmoid(b_proj(x)), but at most 1 + exp(g), so that no eigenvalue is below -1. Published Comba has a sigmoid in its
output gate, and flash-linear-attention brings the erase key f k to unit length too, so that f only acts in the
correction of q there.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.layer import DeltaRule, MixCall, Part, State
from deltanet_hf.mixers.layer.delta_rule import delta_rule, wide_range

WEAKEST_FEEDBACK = -7.0  # a logit; what is divided by its sigmoid stays in range
START_FEEDBACK = 4.0  # f = .98: almost the delta rule, and f still has a gradient


class Feedback(Part):
    """Feedback factor f per state, and the correction of the queries, d per output head; both in float32."""

    def __init__(self, states: int, heads: int) -> None:
        super().__init__()
        self.feedback = nn.Parameter(torch.empty(states, dtype=torch.float32))
        self.correction = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.feedback.fill_(START_FEEDBACK)
            self.correction.zero_()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, T, HQ, D], k [B, T, HK, D] -> corrected queries [B, T, HO, D] in the dtype of q, and f [HV]."""
        f = self.feedback.float().clamp_min(WEAKEST_FEEDBACK).sigmoid()
        heads = self.correction.numel()
        factor = self.correction.float() * f.repeat_interleave(heads // f.numel())
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
        return (q - factor.unsqueeze(-1) * k).to(q.dtype), f


class Comba(DeltaRule):
    """The Comba layer; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "comba"
    title: ClassVar[str] = "Comba"
    may_delay: ClassVar[bool] = False
    fp32: ClassVar[tuple[str, ...]] = (*DeltaRule.fp32, "feedback", "correction")

    def add_gates(self) -> None:
        super().add_gates()
        self.closed_loop = Feedback(self.num_states, self.num_heads)

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        g, eta = call.gates
        if self.settings.allow_neg_eigval:
            eta = contracting(eta, g)
        q, f = self.closed_loop(call.q, call.k)
        return undecayed_rule(call._replace(q=q, gates=(g, eta)), f, self.settings.state_dtype)


def contracting(eta: Tensor, g: Tensor) -> Tensor:
    """The write strengths, at most 1 + exp(g): beyond, exp(g) - eta is below -1, and the state grows at each write.

    Gated DeltaNet, which erases behind the decay, is bounded for every strength up to 2.
    """
    return torch.minimum(eta, 1 + g.exp())


def undecayed_rule(call: MixCall, feedback: Tensor, state_dtype: str) -> tuple[Tensor, State]:
    """The rule above, with q and k brought to unit length; gates (g, eta), feedback [HV], the rest as in `delta_rule`.

    The gated delta rule that predicts from the undecayed state, with strength eta f and values v / f, erases and
    writes the same.
    """
    (g, eta), (q, k, v) = call.gates, wide_range(call)
    values = (v / feedback.unsqueeze(-1)).to(v.dtype)
    mapped = call._replace(q=q, k=k, v=values, gates=(g, eta * feedback))
    output, new_state = delta_rule(mapped, state_dtype, erase="undecayed")
    return output.to(call.v.dtype), new_state
