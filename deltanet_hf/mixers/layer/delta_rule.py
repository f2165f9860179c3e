"""The base of the rules of the delta family: a state per head with a log decay and a write strength per token.

Per head, with a log decay g_t <= 0 and a write strength beta_t,

    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

with q and k at unit length. A rule says by class data where g and beta come from and what a write erases; a rule with
another recurrence defines `mix`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.layer.attention_shape import MixerProjections
from deltanet_hf.mixers.layer.layer_call import MixCall, Projected
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.layer.parts import DecayGate
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from deltanet_kernels import (
    chunk_gated_delta_rule,
    chunk_group_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from deltanet_kernels.arguments import Erase

CLOSED_GATE = -1e4  # a gate logit whose sigmoid and softplus are exactly 0


@dataclass(frozen=True)
class AdditiveSettings(MixerProjections):
    """Settings of the rules that erase nothing."""

    def validate(self, where: str) -> None:
        super().validate(where)
        if self.allow_neg_eigval:
            raise ValueError(f"{where}.allow_neg_eigval: got true, but this rule erases nothing; leave it out")


class StepGates(NamedTuple):
    """Decay and write strength of one token, as the fused decoding step takes them."""

    a: Tensor  # [B, 1, HV]: logit of the decay; the log decay itself without A_log
    b: Tensor  # [B, 1, HV]: logit of the write strength; the strength itself without `sigmoid`
    A_log: Tensor | None = None  # [HV], with dt_bias
    dt_bias: Tensor | None = None
    sigmoid: bool = True


class DeltaRule(Mixer):
    """A mixer whose rule has the gates above.

    By default the gates are those of Gated DeltaNet, and `mix` is the rule of the module's docstring. A subclass
    changes class data; one with other gates defines `add_gates`, `gates` and `step_gates`, one with another recurrence
    `mix` and, where its state differs, `recurrent_shapes`.
    """

    fp32: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", *WindowBranch.FP32)
    without_lora: ClassVar[tuple[str, ...]] = ("a_proj", "b_proj", "share_proj")  # one output per head
    erase: ClassVar[Erase] = "decayed"
    """The prediction that a write subtracts from its value, in `mix` and in the fused step."""
    decays: ClassVar[Literal["by token", "by channel", "by head", "never"]] = "by token"
    """by token: `decay` of a_proj(x); by channel: see `ChannelRule`; by head: a learned constant; never: g = 0."""
    strengths: ClassVar[Literal["sigmoid", "other", "one"]] = "sigmoid"
    """sigmoid: of b_proj(x); other: another function of projections of x; one: beta = 1."""
    is_gated_delta_rule: ClassVar[bool] = False
    """Whether `mix` is the gated delta rule of `gates` wherever the state is that of the base class. A subclass that
    changes the rule or its gates does not inherit this."""
    a_proj: nn.Linear
    b_proj: nn.Linear
    decay: Any  # the part that gives the log decay

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        said_of = next(kind for kind in cls.__mro__ if "is_gated_delta_rule" in vars(kind))
        if any(getattr(cls, name) is not getattr(said_of, name) for name in ("mix", "mix_groups", "gates", "strength")):
            cls.is_gated_delta_rule = False

    def add_gates(self) -> None:
        hidden = self.q_proj.in_features
        if self.decays == "by token":
            self.a_proj = nn.Linear(hidden, self.num_states, bias=False)
        if self.strengths != "one":
            self.b_proj = nn.Linear(hidden, self.num_states, bias=self.settings.gate_bias)
        if self.decays == "by token":
            self.decay = DecayGate(self.num_states)

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """g and beta [B, T, HV] float32, both 0 at padding, and what `further_gates` returns."""
        a, b = closed(projected.a, padding), closed(projected.b, padding)
        return *self.gates_of(a, b), *self.further_gates(projected.x)

    def gates_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """g and beta from their logits."""
        return self.decay(a), self.strength(b)

    def further_gates(self, x: Tensor) -> tuple[Tensor, ...]:
        """Further inputs of `mix` besides g and beta: tensors [B, T, ...] from the layer's input x [B, T, hidden]."""
        return ()

    def strength(self, b: Tensor) -> Tensor:
        """Write strength in float32 from its logit b: up to 1, or up to 2 with `allow_neg_eigval`."""
        return b.float().sigmoid() * self.max_strength

    @property
    def max_strength(self) -> int:
        return 2 if self.settings.allow_neg_eigval else 1

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        return delta_rule(call, self.settings.state_dtype, erase=self.erase)

    def mix_groups(self, call: MixCall) -> tuple[Tensor, State]:
        """As in the base class, by an operator of its own for the rule of the module's docstring."""
        if not self.has_operators or self.erase != "decayed":
            return super().mix_groups(call)
        g, beta = call.gates
        output, new_state = chunk_group_gated_delta_rule(
            call.q,
            call.k,
            call.v,
            g,
            beta,
            initial_state=None if call.state is None else wide(call.state["state"], call.q),
            output_final_state=call.keep_state,
            use_qk_l2norm_in_kernel=True,
        )
        return output, stored(new_state, self.settings.state_dtype)

    @property
    def has_operators(self) -> bool:
        """Whether operators that know one state D x D compute `mix`: of groups and, in the fast form, of steps."""
        return self.is_gated_delta_rule and self.recurrent_shapes() == DeltaRule.recurrent_shapes(self)

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        return {"state": self.state_shape()}

    def state_shape(self, rows: int | None = None) -> TensorShape:
        """A state of `rows` x D per head (D x D by default) that `state_dtype` may round."""
        dtype = getattr(torch, self.settings.state_dtype)
        return TensorShape((self.num_states, rows or self.head_dim, self.head_dim), dtype)

    def rounded(self, state: Tensor) -> Tensor:
        """A tensor of the state as the cache keeps it."""
        return state.bfloat16() if self.settings.state_dtype == "bfloat16" else state

    def step_gates(self, projected: Projected) -> StepGates:
        """Decay and write strength for the fused step, from the projections of one token."""
        if self.strengths == "one":
            g, beta = self.gates(projected, None)
            return StepGates(g, beta, sigmoid=False)
        a, b = closed(projected.a, None), closed(projected.b, None)
        return StepGates(a, b, self.decay.A_log, self.decay.dt_bias)

    # The start from a teacher.

    def before_fit(self) -> None:
        """Give what the fit reads or fits besides decay and strength its first values; most rules have no such part."""

    def after_fit(self) -> None:
        """Give what the fit does not read its start values; most rules have no such part."""

    def adapt_to(self, q: Tensor, k: Tensor) -> None:
        """Set what the rule derives from a teacher's q [n, T, HQ, D] and k [n, T, HV, D]; most derive nothing."""

    def strength_logit(self, beta: Tensor) -> Tensor:
        """The logit at which a key of the usual length is written with the strength beta (0 < beta < 1)."""
        return (beta / self.max_strength).logit()

    def rule_parameters(self) -> list[nn.Parameter]:
        """Parameters of the rule that do not depend on the input; the fitted start fits them too."""
        return []


def closed(logits: Tensor | None, padding: Tensor | None) -> Tensor:
    """Logits of a gate [B, T, ...], which the layer has, with `CLOSED_GATE` at padding."""
    assert logits is not None
    return logits if padding is None else logits.masked_fill(padding.unsqueeze(-1), CLOSED_GATE)


def delta_rule(
    call: MixCall,
    state_dtype: str,
    *,
    unit_length: bool = True,
    erase: Erase = "decayed",
    recurrent: bool | None = None,
) -> tuple[Tensor, State]:
    """The gated delta rule on a mixer's state, with the gates (g, beta) [B, T, HV].

    Args:
        state_dtype: "bfloat16" rounds the new state.
        unit_length: whether q and k are brought to unit length.
        erase: as in `chunk_gated_delta_rule`.
        recurrent: take the tokens one by one, which is the faster way for very few and has no gradients on CUDA; by
            default in a decoding step.
    """
    g, beta = call.gates
    one_by_one = call.decodes if recurrent is None else recurrent
    rule = fused_recurrent_gated_delta_rule if one_by_one else chunk_gated_delta_rule
    output, new_state = rule(
        call.q,
        call.k,
        call.v,
        g,
        beta,
        initial_state=None if call.state is None else wide(call.state["state"], call.q),
        output_final_state=call.keep_state,
        use_qk_l2norm_in_kernel=unit_length,
        cu_seqlens=call.cu_seqlens,
        erase=erase,
    )
    return output, stored(new_state, state_dtype)


def stored(new_state: Tensor | None, dtype: str) -> State:
    """The new state as a mixer keeps it."""
    if new_state is None:
        return {}
    return {"state": new_state.bfloat16() if dtype == "bfloat16" else new_state}


def wide(state: Tensor, q: Tensor) -> Tensor:
    """A tensor of the cache in the dtype of the arithmetic."""
    return state.to(torch.promote_types(q.dtype, torch.float32))


def wide_range(call: MixCall) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in a dtype with the range of float32, for values scaled by large factors."""
    if call.v.dtype == torch.float16:
        return call.q.float(), call.k.float(), call.v.float()
    return call.q, call.k, call.v
