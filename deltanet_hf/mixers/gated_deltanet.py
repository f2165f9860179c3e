"""Gated DeltaNet (Gated Delta Networks, arXiv 2412.06464, eq. 10).

Per head, with a log decay g_t <= 0 and a write strength beta_t:

    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length; beta = sigmoid(b_proj(x)) and g = -exp(A_log) softplus(a_proj(x) + dt_bias). The output is
RMSNorm(o) * weight * silu(g_proj(x)), through o_proj.

With `allow_neg_eigval`, beta = 2 sigmoid(b_proj(x)): the factors I - beta k k^T then have eigenvalues down to -1, which
tracking a state requires (arXiv 2411.12537). The strength may be exactly 2, because a smaller cap forgets: with 1.992,
a value that every token turns round has .61 of its size after 64 tokens, and nothing of it is left after 1,024. With 2
it keeps its size, because the operator brings k to a length just below 1: on a CPU, 8,192 reflections at one key
changed the norm by at most .6% in float32 and in bfloat16.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.attention_shape import MixerProjections
from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.layer_kind import TensorShape
from deltanet_hf.mixers.parts import DecayGate
from deltanet_hf.mixers.state import State
from deltanet_hf.mixers.window_branch import WindowBranch
from deltanet_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from deltanet_kernels.arguments import Erase

CLOSED_GATE = -1e4  # a gate logit whose sigmoid and softplus are exactly 0

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


class StepGates(NamedTuple):
    """Decay and write strength of one token, as the fused decoding step takes them."""

    a: Tensor  # [B, 1, HV]: logit of the decay; the log decay itself without A_log
    b: Tensor  # [B, 1, HV]: logit of the write strength; the strength itself without `sigmoid`
    A_log: Tensor | None = None  # [HV], with dt_bias
    dt_bias: Tensor | None = None
    sigmoid: bool = True


class GatedDeltaNet(Mixer):
    """The Gated DeltaNet layer; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "gated_deltanet"
    title: ClassVar[str] = "Gated DeltaNet"
    fp32: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", *WindowBranch.FP32)
    without_lora: ClassVar[tuple[str, ...]] = ("a_proj", "b_proj", "share_proj")  # one output per head
    erase: ClassVar[Erase] = "decayed"
    """The prediction that a write subtracts from its value, in `mix` and in the fused step."""
    fits_memory: ClassVar[bool] = True
    """Whether it has a decay or a write strength that a start from a teacher fits."""
    sigmoid_strength: ClassVar[bool] = True
    """Whether `strength` is that of this class."""
    a_proj: Any  # nn.Linear, or None in a rule whose decay does not come from the input
    b_proj: Any  # nn.Linear, or None in a rule without a write strength
    decay: Any  # a part, or None in a rule without decay

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixerProjections:
        if profile == "qwen3_5" and cls is GatedDeltaNet:
            return cls.Settings(**QWEN3_5)
        return super().default_settings(profile, training)

    def add_gates(self) -> None:
        hidden = self.q_proj.in_features
        self.a_proj = nn.Linear(hidden, self.num_states, bias=False)
        self.b_proj = nn.Linear(hidden, self.num_states, bias=self.settings.gate_bias)
        self.decay = DecayGate(self.num_states)

    def gates(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay g and write strength beta, both [B, T, HV] float32; both 0 at padding."""
        a, b = self.a_proj(x), self.b_proj(x)
        if padding is not None:
            a, b = (gate.masked_fill(padding.unsqueeze(-1), CLOSED_GATE) for gate in (a, b))
        return self.gates_of(a, b)

    def gates_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """`gates` from their logits."""
        return self.decay(a), self.strength(b)

    def strength(self, b: Tensor) -> Tensor:
        """Write strength in float32 from its logit b: up to 1, or up to 2 with `allow_neg_eigval`."""
        return b.float().sigmoid() * self.max_strength

    def strength_logit(self, beta: Tensor) -> Tensor:
        """The logit at which a key of the usual length is written with the strength beta (0 < beta < 1)."""
        return (beta / self.max_strength).logit()

    def adapt_to(self, q: Tensor, k: Tensor) -> None:
        """Set what the rule derives from a teacher's q [n, T, HQ, D] and k [n, T, HV, D]; most derive nothing."""

    @property
    def max_strength(self) -> int:
        return 2 if self.settings.allow_neg_eigval else 1

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: tuple[Tensor, ...],
        state: State | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State]:
        g, beta = gates
        recurrent, dtype = q.shape[1] == 1, self.settings.state_dtype
        return delta_rule(q, k, v, g, beta, state, keep_state, cu_seqlens, recurrent, dtype, erase=self.erase)

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        dtype = getattr(torch, self.settings.state_dtype)
        return {"state": TensorShape((self.num_states, self.head_dim, self.head_dim), dtype)}

    @property
    def fused_step(self) -> bool:
        """Whether the fused decoding step computes this rule; not one with a `mix` of its own, unless it says so."""
        return type(self).mix is GatedDeltaNet.mix

    def step_gates(self, x: Tensor) -> StepGates:
        """Decay and write strength for the fused step, from the layer's input x [B, 1, hidden]."""
        return StepGates(self.a_proj(x), self.b_proj(x), self.decay.A_log, self.decay.dt_bias)


def delta_rule(
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
    erase: Erase = "decayed",
) -> tuple[Tensor, State]:
    """The gated delta rule, by default with q and k at unit length, on a mixer's state; arguments as in `Mixer.mix`.

    `recurrent` takes the tokens one by one, which is the faster way for very few; it has no gradients on CUDA. The new
    state is rounded to bfloat16 if `state_dtype` says so. `erase`: see `chunk_gated_delta_rule`.
    """
    rule = fused_recurrent_gated_delta_rule if recurrent and not torch.is_grad_enabled() else chunk_gated_delta_rule
    before = None if state is None else state["state"].to(torch.promote_types(q.dtype, torch.float32))
    output, new_state = rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=before,
        output_final_state=keep_state,
        use_qk_l2norm_in_kernel=unit_length,
        cu_seqlens=cu_seqlens,
        erase=erase,
    )
    return output, stored(new_state, state_dtype)


def stored(new_state: Tensor | None, dtype: str) -> State:
    """The new state as a mixer keeps it."""
    if new_state is None:
        return {}
    return {"state": new_state.bfloat16() if dtype == "bfloat16" else new_state}
