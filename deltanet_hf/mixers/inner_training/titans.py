"""The memory of Titans (arXiv 2501.00663) with a linear inner model: gradient descent with momentum and weight decay.

Per head, with a log decay g_t <= 0, a momentum mu_t and a step size theta_t:

    Z_t = mu_t Z_{t-1} + theta_t k_t (v_t - k_t^T S_{t-1})^T
    S_t = exp(g_t) S_{t-1} + Z_t        o_t = D^-0.5 q_t^T S_t

q and k have unit length; g and theta are the log decay and the write strength of Gated DeltaNet, and
mu = sigmoid(m_proj(x)). The gradient is taken per token, not per block of tokens as in the paper's parallel form. With
mu = 0 the rule is that of Comba (arXiv 2506.02475) without its output correction: the prediction reads the state before
it decays. As there, `allow_neg_eigval` allows theta up to 1 + exp(g). S and Z are both kept, twice the state of Gated
DeltaNet; `state_dtype` rounds both.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.comba import contracting
from deltanet_hf.mixers.layer import DeltaRule, MixCall, State, TensorShape
from deltanet_hf.mixers.layer.delta_rule import wide
from deltanet_kernels import TitansState, chunk_titans, naive_titans

START_LOGIT = -4.0
"""Of the momentum: sigmoid(-4) = 0.018 changes little and still has a gradient."""


class Titans(DeltaRule):
    """The linear memory of Titans; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "titans"
    title: ClassVar[str] = "Titans (linear memory)"
    may_delay: ClassVar[bool] = False
    without_lora: ClassVar[tuple[str, ...]] = ("m_proj", *DeltaRule.without_lora)

    def add_gates(self) -> None:
        super().add_gates()
        self.m_proj = nn.Linear(self.q_proj.in_features, self.num_states)

    def before_fit(self) -> None:
        """The same small momentum for every token."""
        nn.init.zeros_(self.m_proj.weight)
        nn.init.constant_(self.m_proj.bias, START_LOGIT)

    def rule_parameters(self) -> list[nn.Parameter]:
        return [self.m_proj.bias]

    def further_gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """The log momentum [B, T, HV] float32."""
        return (F.logsigmoid(self.m_proj(x).float()),)

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        q, state, (g, theta, log_mu) = call.q, call.state, call.gates
        if self.settings.allow_neg_eigval:
            theta = contracting(theta, g)
        rule = naive_titans if call.decodes else chunk_titans
        output, new = rule(
            q,
            call.k,
            call.v,
            g,
            log_mu,
            theta,
            initial_state=None if state is None else TitansState(wide(state["state"], q), wide(state["momentum"], q)),
            output_final_state=call.keep_state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=call.cu_seqlens,
            padding=call.padding,  # where momentum would move the state
        )
        if new is None:
            return output, {}
        return output, {"state": self.rounded(new.memory), "momentum": self.rounded(new.momentum)}

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        return {"state": self.state_shape(), "momentum": self.state_shape()}
