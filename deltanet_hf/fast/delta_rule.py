"""The rules of the delta family without gradients: gates, a prompt's rule and a decoding step by few launches.

Of Gated DeltaNet's gates, one kernel computes both. Of a step of the gated delta rule, one kernel computes everything
between the projections and the window, another (three in 8 or 4 bits) attends in the window at the same time, and one
mixes. Padded steps take them with a window in 16 bits or none; with a window in 3 or 2 bits no step does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deltanet_hf.fast.mixer import FastMixer
from deltanet_hf.fast.side_by_side import side_by_side
from deltanet_hf.fast.window import mixture, window_step
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.delta_rule import DeltaRule
from deltanet_hf.mixers.layer.layer_call import LayerCall
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.mix_call import MixCall
from deltanet_hf.mixers.layer.projected import Projected
from deltanet_kernels import gate_values, gated_delta_step_
from deltanet_kernels.arguments import LATE, RuleCall
from deltanet_kernels.gated_delta_rule.operators import chunk_rule
from deltanet_kernels.prompt.calls import GateValuesCall


class FastDeltaRule(FastMixer, DeltaRule):
    """As `FastMixer`, of a `DeltaRule`."""

    def gates_of(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        if (self.decays, self.strengths) != ("by token", "sigmoid"):
            return super().gates_of(a, b)
        return gate_values.unchecked(GateValuesCall(a, b, self.decay.A_log, self.decay.dt_bias, self.max_strength))

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        """As in the base class; a first prompt goes to the operator without a check of its arguments."""
        further = call.state is not None or call.cu_seqlens is not None or call.q.shape[1] == 1
        if further or not self.is_gated_delta_rule:
            return super().mix(call)
        g, beta = call.gates
        rule = RuleCall(call.q, call.k, call.v, g, beta, None, None, call.keep_state, True, erase=self.erase)
        output, new_state = chunk_rule.unchecked(rule)
        return output, self.stored(new_state, call.v.dtype)

    @property
    def has_step(self) -> bool:  # type: ignore[override]
        bits = 16 if self.window_branch is None else self.window_branch.cache_bits  # 3 and 2 have no packed form
        return self.has_prompt and bits >= 4 and self.is_gated_delta_rule

    def steps(self, x: Tensor, call: LayerCall) -> bool:
        """Whether a call of x [B, T, ...] is a step that changes the state in place."""
        if x.shape[1] != 1 or not self.has_step or call.cache is None or not call.cache.may_change:
            return False
        return call.padding is None or self.window_branch is None or self.window_branch.cache_bits == 16

    def masked(self, x: Tensor, call: LayerCall) -> Tensor:
        """As in the base class; the kernels of a step know its padding."""
        return x if self.steps(x, call) else super().masked(x, call)

    def attend(
        self, projected: Projected, position_embeddings: PositionEmbeddings | None, call: LayerCall
    ) -> tuple[Tensor, State]:
        """As in the base class; a step changes the state in the cache in place."""
        if not self.steps(projected.x, call):
            return super().attend(projected, position_embeddings, call)
        assert call.cache is not None
        state, padding, conv_weight, norm = call.cache.state, call.padding, self.conv_weight, self.norm
        tail = state["conv_tail"].clone() if padding is not None and conv_weight is not None else None
        x, q, k, v = projected[:4]
        rule_gates = self.step_gates(projected)
        cos, sin = self.angles(position_embeddings)
        late: dict[str, Any] = {name: state[name] for name in LATE if name in state}

        def recur() -> Tensor:
            return gated_delta_step_(
                q,
                k,
                v,
                rule_gates.a,
                rule_gates.b,
                state["state"],
                rule_gates.A_log,
                rule_gates.dt_bias,
                conv_weight,
                state.get("conv_tail"),
                projected.gate,
                None if norm is None else norm.weight,
                padding,
                cos,
                sin,
                eps=1e-6 if norm is None else norm.eps,
                qk_silu=self.qk_silu,
                v_silu=self.v_silu,
                k_offset=self.key_offset,
                allow_neg_eigval=self.settings.allow_neg_eigval,
                use_beta_sigmoid_in_kernel=rule_gates.sigmoid,
                erase=self.erase,
                kv_repeats=self.kv_repeats,
                slots=call.slots,
                **late,
            )

        branch = self.window_branch
        if branch is None:
            output = recur()
        else:
            heads = tuple(map(self.split_heads, (q, k, v)))
            far, near = side_by_side(
                recur, lambda: window_step(branch, *heads, state, padding, cos, sin, call.slots), x.device
            )
            output = mixture(branch, projected.share, near, far)  # type: ignore[arg-type]
        if tail is not None and padding is not None:  # the kernels move the tail of all rows
            state["conv_tail"].copy_(tail.where(padding.unsqueeze(-1), state["conv_tail"]))
        return output, state
