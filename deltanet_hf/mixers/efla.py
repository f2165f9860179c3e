"""A delta rule whose keys keep their length: one step along the flow that its error gives (EFLA, arXiv 2512.12602).

The delta rule with strength eta is Euler's step of dS/ds = k_t (v_t - k_t^T S)^T. The step of length eta_t can be taken
in three ways, which differ only in the factor b_t:

    S_t = exp(g_t) S_{t-1} + k_t b_t (v_t - k_t^T exp(g_t) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

    exact      b = (1 - exp(-eta |k|^2)) / |k|^2     the transition has the eigenvalue exp(-eta |k|^2)
    implicit   b = eta / (1 + eta |k|^2)             1 / (1 + eta |k|^2)
    explicit   b = min(eta, 1 / |k|^2)               1 - eta |k|^2, cut off at 0

The eigenvalues are in [0, 1] for every key. The implicit step minimises |S - S_{t-1}|^2 + eta |v - k^T S|^2, as in
Longhorn (arXiv 2407.14207), which keeps only the diagonal of k k^T. The paper's rule has no decay; g is that of Gated
DeltaNet here. eta = softplus(b_proj(x)) step_scale, with a learned scale per head that begins as 1 / mean |k|^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer import DeltaRule, MixCall, MixerProjections, Part, State
from deltanet_hf.mixers.layer.delta_rule import wide_range

FlowStep = Literal["exact", "implicit", "explicit"]
NORM_EPS = 1e-6  # what the operator adds to |k|^2 when it brings k to unit length
SERIES_BELOW = 0.1
LONGEST = 1e30  # |k|^2 above it counts as this much: float32 reaches 3e38


@dataclass(frozen=True)
class EflaSettings(MixerProjections):
    """Settings of EFLA."""

    flow_step: FlowStep = "exact"  # how the flow of a token is integrated

    def validate(self, where: str) -> None:
        super().validate(where)
        if self.allow_neg_eigval:
            raise ValueError(f"{where}.allow_neg_eigval: got true, but this rule has eigenvalues 0 to 1; leave it out")


class StepLength(Part):
    """Step length eta = softplus(b) exp(log_scale) with a scale per head, in float32; eta has the unit of 1/|k|^2."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.log_scale = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """1/D, for channels of size 1."""
        with torch.no_grad():
            self.log_scale.copy_(-torch.full_like(self.log_scale, self.head_dim).log())

    def forward(self, b: Tensor) -> Tensor:
        """b [B, T, HV] -> eta [B, T, HV] float32, >= 0."""
        return F.softplus(b.float()) * self.log_scale.float().exp()


class Efla(DeltaRule):
    """The EFLA layer; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "efla"
    title: ClassVar[str] = "EFLA"
    Settings: ClassVar[type[MixerProjections]] = EflaSettings
    settings: EflaSettings  # type: ignore[assignment]
    fp32: ClassVar[tuple[str, ...]] = (*DeltaRule.fp32, "log_scale")
    strengths = "other"

    def add_gates(self) -> None:
        super().add_gates()
        self.step_length = StepLength(self.num_states, self.head_dim)

    def strength(self, b: Tensor) -> Tensor:
        """Step length eta in float32 from its logit."""
        return self.step_length(b)  # type: ignore[no-any-return]

    def strength_logit(self, beta: Tensor) -> Tensor:
        """The logit at which a key with |k|^2 = 1 / step_scale is written with the strength beta."""
        if self.settings.flow_step == "exact":
            return beta.logit()  # softplus of it is -log(1 - beta)
        step = beta / (1 - beta) if self.settings.flow_step == "implicit" else beta
        return step.expm1().log()

    @torch.no_grad()
    def adapt_to(self, q: Tensor, k: Tensor) -> None:
        """Sets the scale of the steps to 1 / mean |k|^2; the first key of a sequence is unlike the others."""
        size = k[:, -max(1, k.shape[1] - 1) :].float().square().sum(-1).mean((0, 1))
        self.step_length.log_scale.copy_(-size.clamp_min(NORM_EPS).log())

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        (g, eta), (q, k, v) = call.gates, wide_range(call)
        values, beta = unit_key_inputs(k, v, eta, self.settings.flow_step)
        output, state = super().mix(call._replace(q=q, k=k, v=values, gates=(g, beta)))
        return output.to(call.v.dtype), state


def unit_key_inputs(k: Tensor, v: Tensor, eta: Tensor, flow_step: FlowStep) -> tuple[Tensor, Tensor]:
    """Values and strengths with which a delta rule on unit keys is the rule above.

    Args:
        k: keys [B, T, H, K] of any length, which the operator brings to unit length.
        v: [B, T, HV, V].
        eta: step lengths [B, T, HV] >= 0.

    Returns:
        v / |k| in the dtype of v, and the strengths b |k|^2 <= 1 in the dtype of eta; both also for a key of 0.
    """
    dtype = torch.promote_types(k.dtype, torch.float32)
    n2 = k.to(dtype).square().sum(-1).clamp_max(LONGEST)
    n2 = n2.repeat_interleave(v.shape[2] // k.shape[2], dim=-1)
    x = eta.to(dtype) * n2
    if flow_step == "exact":
        shrink = phi1(x)
    elif flow_step == "implicit":
        shrink = 1 / (1 + x)
    else:
        shrink = 1 / x.clamp_min(1)
    values = v * torch.rsqrt(n2 + NORM_EPS).unsqueeze(-1)
    return values.to(v.dtype), ((n2 + NORM_EPS) * eta * shrink).to(eta.dtype)


def phi1(x: Tensor) -> Tensor:
    """(1 - exp(-x)) / x for x >= 0, with 1 at 0, and its gradient, both without cancellation."""
    small = x < SERIES_BELOW
    near, far = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = torch.ones_like(x)
    for n in range(8, 1, -1):
        series = 1 - near / n * series
    return torch.where(small, series, -torch.expm1(-far) / far)
