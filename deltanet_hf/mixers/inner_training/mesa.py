"""The Mesa layer (MesaNet, arXiv 2506.05233): least squares over all tokens instead of one gradient step per token.

Per head, with a log decay g_t <= 0, a write weight beta_t and a ridge Lambda > 0 per key channel:

    S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T        H_t = exp(g_t) H_{t-1} + beta_t k_t k_t^T
    o_t = D^-0.5 q_t^T (H_t + diag(Lambda))^{-1} S_t

q and k have unit length. The gates are those of Gated DeltaNet, which with A_log = 0 are the published ones, sigmoids
of projections of x. Lambda = 0.25 + softplus(ridge), per state and channel: with less, conjugate gradients converge
slowly where the memory is short. A large Lambda makes the layer gated linear attention, divided by Lambda.

S and H are both kept, twice the state of Gated DeltaNet. `state_dtype` rounds S only: H is inverted, and stays float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer import DeltaRule, MixCall, MixerProjections, Part, State, TensorShape
from deltanet_hf.mixers.layer.delta_rule import wide
from deltanet_hf.mixers.layer.settings import check_at_least
from deltanet_kernels import MesaState, chunk_mesa, recurrent_mesa

LEAST_RIDGE = 0.25
START_RIDGE = 1.0


@dataclass(frozen=True)
class MesaSettings(MixerProjections):
    """Settings of the Mesa layer."""

    cg_steps: int = 16  # steps of conjugate gradients per token, in training as in decoding

    def validate(self, where: str) -> None:
        super().validate(where)
        check_at_least(where, "cg_steps", self.cg_steps, 1)
        if self.allow_neg_eigval:
            raise ValueError(f"{where}.allow_neg_eigval: got true, but least squares erase nothing; leave it out")


class MesaRidge(Part):
    """Lambda per state and key channel, from `ridge` [HV, D] float32."""

    def __init__(self, states: int, head_dim: int) -> None:
        super().__init__()
        self.ridge = nn.Parameter(torch.empty(states, head_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Lambda = 1."""
        nn.init.constant_(self.ridge, math.log(math.expm1(START_RIDGE - LEAST_RIDGE)))

    def forward(self, dtype: torch.dtype) -> Tensor:
        """Lambda [HV, D] in this dtype."""
        return LEAST_RIDGE + F.softplus(self.ridge.to(dtype))


class Mesa(DeltaRule):
    """The Mesa layer; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "mesa"
    title: ClassVar[str] = "Mesa layer"
    Settings: ClassVar[type[MixerProjections]] = MesaSettings
    settings: MesaSettings  # type: ignore[assignment]
    fp32: ClassVar[tuple[str, ...]] = ("ridge", *DeltaRule.fp32)

    def add_gates(self) -> None:
        super().add_gates()
        self.mesa_ridge = MesaRidge(self.num_states, self.head_dim)

    def rule_parameters(self) -> list[nn.Parameter]:
        return [self.mesa_ridge.ridge]

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        q, k, v, state, (g, beta) = call.q, call.k, call.v, call.state, call.gates
        ridge = self.mesa_ridge(torch.promote_types(q.dtype, torch.float32))
        before = None if state is None else MesaState(wide(state["state"], q), wide(state["key_state"], q))
        steps = self.settings.cg_steps
        new: MesaState | None
        if call.decodes:
            output, new = recurrent_mesa(
                q, k, v, g, beta, ridge, initial_state=before, use_qk_l2norm_in_kernel=True, steps=steps
            )
        else:
            output, new = chunk_mesa(
                q,
                k,
                v,
                g,
                beta,
                ridge,
                initial_state=before,
                output_final_state=call.keep_state,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=call.cu_seqlens,
                steps=steps,
            )
        if new is None or not call.keep_state:
            return output, {}
        return output, {"state": self.rounded(new.values), "key_state": new.keys}

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        keys = TensorShape((self.num_states, self.head_dim, self.head_dim), torch.float32)
        return {"state": self.state_shape(), "key_state": keys}
