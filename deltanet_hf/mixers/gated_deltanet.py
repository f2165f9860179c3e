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

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.attention_shape import MixerProjections
from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.joint_projection import product, products
from deltanet_hf.mixers.layer_kind import PositionEmbeddings, TensorShape
from deltanet_hf.mixers.parts import DecayGate, is_plain
from deltanet_hf.mixers.prompt import Projected, without_gradients
from deltanet_hf.mixers.state import State
from deltanet_hf.mixers.window_branch import WindowBranch
from deltanet_kernels import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gate_values,
    gated_delta_step_,
)
from deltanet_kernels.arguments import Erase, RuleCall
from deltanet_kernels.gated_delta_rule.operators import chunk_rule
from deltanet_kernels.prompt.calls import GateValuesCall

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
        return self._gates_of(a, b)

    def _gates_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """`gates` from their logits."""
        decay = self.decay
        own = type(decay) is DecayGate and type(self).strength is GatedDeltaNet.strength
        if own and without_gradients() and is_plain(decay):
            held = decay._parameters
            call = GateValuesCall(a, b, held["A_log"], held["dt_bias"], self.max_strength)  # type: ignore[arg-type]
            return gate_values.unchecked(call)
        return decay(a), self.strength(b)

    def projected(self, x: Tensor, padding: Tensor | None, with_share: bool) -> Projected:
        """As in the base class; in calls without gradients by few products, as in a step."""
        own = type(self).gates is GatedDeltaNet.gates and self.fused_step
        if not own or padding is not None or not without_gradients():
            return super().projected(x, padding, with_share)
        linears, branch = self.step_projections(), self.window_branch
        share = None if branch is None else branch.share_proj
        if share is not None and not with_share:
            linears.remove(share)
        of = products(x, linears)
        held, gate = self._modules, self._output_gate(of)
        q, k, v, a, b = (of[held[name]] for name in ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj"))  # type: ignore[index]
        return Projected(
            self.through_norms(q, k, v),
            self._gates_of(a, b),
            None if gate is None else self._split(gate),
            None if share is None else of.get(share),
        )

    def _output_gate(self, of: Mapping[nn.Module, Tensor]) -> Tensor | None:
        """Logits of the output gate [B, T, H*D], from the products with the layers of `step_projections`."""
        gate, down = self.g_proj, self.g_down
        if gate is None:
            return None
        return of[gate] if down is None else product(of[down], gate)

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

    def step(
        self, x: Tensor, position_embeddings: PositionEmbeddings | None, state: State, padding: Tensor | None
    ) -> Tensor | None:
        """By one kernel between the projections, where the parameters of the parts can be read.

        A second kernel computes the window beside the state. None for rules and convolutions that it does not compute.
        """
        if not self.fused_step or (self.conv1d is not None and self.settings.conv_on == "k"):
            return None
        read = (self.decay, self.norm, self.conv1d, self.k_offset)
        if not all(is_plain(part) for part in read if part is not None):
            return None
        if self.window_branch is not None and not self.window_branch.can_step():
            return None
        of = products(x, self.step_projections())
        q, k, v = self.through_norms(of[self.q_proj], of[self.k_proj], of[self.v_proj])
        cos = sin = None
        if self._rotate is not None:  # every family's `apply_rotary_pos_emb` turns the halves of the leading channels
            assert position_embeddings is not None
            cos, sin = position_embeddings
        gates = self.step_gates(x, of)
        output_gate = self._output_gate(of)
        output = gated_delta_step_(
            q,
            k,
            v,
            gates.a,
            gates.b,
            state["state"],
            gates.A_log,
            gates.dt_bias,
            None if self.conv1d is None else self.conv1d.weight.squeeze(1),
            state.get("conv_tail"),
            output_gate,
            None if self.norm is None else self.norm.weight,
            padding,
            cos,
            sin,
            eps=1e-6 if self.norm is None else self.norm.eps,
            qk_silu=self.settings.qk_activation == "silu",
            v_silu=self.settings.v_activation == "silu",
            k_offset=None if self.k_offset is None else self.k_offset.weight,
            allow_neg_eigval=self.settings.allow_neg_eigval,
            use_beta_sigmoid_in_kernel=gates.sigmoid,
            erase=self.erase,
            kv_repeats=self.kv_repeats,
        )
        if self.window_branch is not None:
            q, k, v = map(self._split, (q, k, v))
            share = of[self.window_branch.share_proj]
            output = self.window_branch.step(share, q, k, v, output, state, padding, cos, sin)
        return product(output.flatten(-2), self.o_proj)

    def step_projections(self) -> list[nn.Module]:
        if not self.fused_step:
            return []
        held: Any = self._modules  # quicker than the attributes of a module
        gate = "g_down" if held.get("g_down") is not None else "g_proj"
        linears = [held.get(name) for name in ("q_proj", "k_proj", "v_proj", gate, "a_proj", "b_proj")]
        branch = held.get("window_branch")
        linears.append(None if branch is None else branch.share_proj)
        return [linear for linear in linears if linear is not None]

    def step_gates(self, x: Tensor, of: Mapping[nn.Module, Tensor]) -> StepGates:
        """Decay and write strength for the fused step.

        Args:
            x: the layer's input [B, 1, hidden].
            of: its products with the layers of `step_projections`.
        """
        return StepGates(of[self.a_proj], of[self.b_proj], self.decay.A_log, self.decay.dt_bias)


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
    if state is None and cu_seqlens is None and not recurrent and without_gradients() and _fit(q, k, v, g, beta):
        output, new_state = chunk_rule.unchecked(
            RuleCall(q, k, v, g, beta, None, None, keep_state, unit_length, erase=erase)
        )
        return output, _stored(new_state, state_dtype)
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
    return output, _stored(new_state, state_dtype)


def _fit(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> bool:
    """Whether a mixer's inputs of the rule, whose heads and sizes are those of its settings, need no further check."""
    alike = q.dtype == k.dtype == v.dtype and q.shape[:2] == v.shape[:2] and k.shape[:2] == v.shape[:2]
    return alike and g.shape == beta.shape == v.shape[:3] and 0 not in v.shape


def _stored(new_state: Tensor | None, dtype: str) -> State:
    """The new state as a mixer keeps it."""
    if new_state is None:
        return {}
    return {"state": new_state.bfloat16() if dtype == "bfloat16" else new_state}
