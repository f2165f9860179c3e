"""A mixer with a state of what has left its window, in 8 or 4 bits and without gradients, by few launches.

`mixers/layer/delayed_state.py` says what is computed. Beside the kernels of a window and of the recurrence, a prompt
takes one for its gates; a step takes three, as that of a window alone.
"""

from __future__ import annotations

from torch import Tensor

from deltanet_hf.fast.mixer import FastDeltaRule
from deltanet_hf.fast.window import WindowOutput, mixture
from deltanet_hf.mixers.cache.quantised_cache_spec import NAMES
from deltanet_hf.mixers.cache.quantised_kv_cache import packed_prompt
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.delayed_state import SCALE, stored_memory
from deltanet_hf.mixers.layer.delta_rule import DeltaRule
from deltanet_hf.mixers.layer.layer_call import Angles, LayerCall, Projected, window_angles
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_kernels import (
    PackedKeyValues,
    chunk_group_gated_delta_rule,
    group_gated_delta_step_,
    group_gates,
    prompt_inputs,
)
from deltanet_kernels.group_rule.calls import GroupGatesCall, GroupRuleCall, GroupStepCall
from deltanet_kernels.packed_cache.calls import PackedStepCall
from deltanet_kernels.packed_cache.layout import PACKED_BITS
from deltanet_kernels.prompt.calls import PromptInputsCall


class FastDelayedRule(FastDeltaRule):
    """As `FastDeltaRule`, of a layer that `serves` takes: whole prompts without padding, and steps."""

    @staticmethod
    def serves(mixer: Mixer) -> bool:
        """Whether the layer is the gated delta rule beside a window of whole groups in 8 or 4 bits."""
        branch, settings = mixer.window_branch, mixer.settings
        if branch is None or not branch.delayed or branch.cache_bits not in PACKED_BITS or not branch.groups:
            return False
        if not isinstance(mixer, DeltaRule) or not mixer.has_operators or mixer.erase != "decayed":
            return False
        rule = (mixer.decays, mixer.strengths, settings.qk_activation, settings.v_activation, mixer.k_offset)
        return rule == ("by token", "sigmoid", "none", "none", None) and branch.learned_sinks is None

    has_step = True

    def attend(self, projected: Projected, position_embeddings: Angles | None, call: LayerCall) -> tuple[Tensor, State]:
        """As in the base class; a step changes the state in the cache in place."""
        if call.padding is None and call.cu_seqlens is None:
            if call.state is None:
                return self._prompt(projected, position_embeddings, call)
            if projected.x.shape[1] == 1 and call.cache is not None and call.cache.may_change:
                return self._step(projected, position_embeddings, call), call.cache.state
        return Mixer.attend(self, projected, position_embeddings, call)  # type: ignore[arg-type]

    def _prompt(
        self, projected: Projected, position_embeddings: Angles | None, call: LayerCall
    ) -> tuple[Tensor, State]:
        branch, length = self.window_branch, call.prompt_length
        assert branch is not None
        assert position_embeddings is not None
        angles, turn = window_angles(position_embeddings, self.sink_bound, call.cache, projected.x.shape[1])
        cos, sin = self.angles(angles)
        rotation = PromptInputsCall(projected.q, projected.k, projected.v, self.head_dim, cos=cos, sin=sin)
        q, k, v, *_ = prompt_inputs.unchecked(rotation)
        k, v, seen, kept = packed_prompt(branch.cache_spec, k, v, length)
        window_output = WindowOutput(*branch.attend_rounded(q, k, v, seen, turn), None)

        logits, hidden = self.step_gates(projected)[:4], branch.window - 1
        gating = GroupGatesCall(*logits, branch.groups, branch.sinks, length, self.max_strength)  # type: ignore[arg-type]
        g, beta, *waiting = group_gates.unchecked(gating)
        if g.shape[1]:
            keys, values = (part[:, : g.shape[1]].flatten(2) for part in seen)
            read, keys, values = map(self.split_heads, self.repeated(q[:, hidden:].flatten(2), keys, values))
            rule = GroupRuleCall(read, keys, values, g, beta, None, None, call.keep_state, True)
            reads, memory = chunk_group_gated_delta_rule.unchecked(rule)
        else:
            reads, memory = q[:, :0], g.new_zeros(len(q), *self.state_shape().shape)
        output = mixture(branch, projected.mixing_logits, window_output, reads, projected.gate, self.norm)  # type: ignore[arg-type]
        if not call.keep_state:
            return output, {}
        assert memory is not None
        gates = {f"gate_{i}": gate for i, gate in enumerate(waiting)}
        return output, stored_memory(self, {"state": self.rounded(memory)}) | kept | gates

    def _step(self, projected: Projected, position_embeddings: Angles | None, call: LayerCall) -> Tensor:
        branch = self.window_branch
        assert branch is not None
        assert call.cache is not None
        assert position_embeddings is not None
        state = call.cache.state
        q, k, v = map(self.split_heads, projected[1:4])  # type: ignore[arg-type]
        angles, turn = window_angles(position_embeddings, self.sink_bound, call.cache, 1)
        cos, sin = self.angles(angles)
        turn_cos, turn_sin = (None, None) if turn is None else turn
        packed = PackedKeyValues(*(state[name] for name in NAMES), branch.cache_spec.key_order)  # type: ignore[call-arg]
        reach = branch.window, branch.sinks, None, branch.scale, branch.softcap
        step = GroupStepCall(
            *self.step_gates(projected)[:4],  # type: ignore[arg-type]
            PackedStepCall(
                q, k, v, packed, *reach, cos, sin, call.state_indices, None, branch.edge, turn_cos, turn_sin
            ),
            state["gate_0"],
            state["gate_1"],
            state["state"],
            state.get(SCALE),
            projected.mixing_logits,  # type: ignore[arg-type]
            branch.slopes.far_slope,
            branch.slopes.near_slope,
            projected.gate,
            None if self.norm is None else self.norm.weight,
            1e-6 if self.norm is None else self.norm.eps,
            self.max_strength,
        )
        return group_gated_delta_step_.unchecked(step)
