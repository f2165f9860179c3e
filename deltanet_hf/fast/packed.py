"""The layer of a model whose keys and values are in 8 or 4 bits, by few launches: prompts and decoding steps.

A layer is one kind of heads or two: softmax attention to all tokens, softmax attention in a window, and a window with a
state of what has left it. `FastPacked` is the layer: one product projects the input for all heads, and three or four
kernels follow for each kind of heads, both kinds at the same time. In a step, one rotates queries and keys and puts the
token into the cache, and two attend; of a prompt without padding, one rotates, one rounds to 8 bits, one packs and one
attends. A state adds no kernel to a step, and to a prompt those of the gates, the recurrence and the mixture.

mixers/attention/packed_softmax.py, mixers/window.py and mixers/layer/delayed_state.py say what is computed, and compute
all other calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.fast.families import family_of
from deltanet_hf.fast.mixer import FastDeltaRule
from deltanet_hf.fast.parts import MergedProjection, fast_norms, with_children
from deltanet_hf.fast.softmax import QKV
from deltanet_hf.fast.window import WindowOutput, mixture
from deltanet_hf.mixers.attention.far_positions import FarSoftmax
from deltanet_hf.mixers.attention.packed_softmax import PackedSoftmax
from deltanet_hf.mixers.attention.paired_class import behind
from deltanet_hf.mixers.cache.argument import given_cache
from deltanet_hf.mixers.cache.quantised_cache_spec import NAMES
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache, quantised_prompt
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.layer.delayed_state import SCALE, held_memory, stored_memory
from deltanet_hf.mixers.layer.delta_rule import DeltaRule, wide
from deltanet_hf.mixers.layer.layer_call import Angles, CacheView, LayerCall, Projected, whole_angles, window_angles
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings, branches_of
from deltanet_hf.mixers.layer.masks import boundaries_in, padding_in
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.window import WindowAttention
from deltanet_kernels import (
    PackedKeyValues,
    chunk_group_gated_delta_rule,
    group_gated_delta_step_,
    group_gates,
    prompt_inputs,
)
from deltanet_kernels.common.device import two_streams
from deltanet_kernels.group_rule.calls import GroupGatesCall, GroupRuleCall, GroupStepCall
from deltanet_kernels.packed_cache.calls import PackedStepCall
from deltanet_kernels.packed_cache.layout import PACKED_BITS
from deltanet_kernels.prompt.calls import PromptInputsCall


def is_packed(attention: Any) -> bool:
    """Whether `FastPacked` computes it: softmax or windows of known families, states that `FastDelayedRule` serves, and
    mixed heads of these, all with a cache in 8 or 4 bits."""
    return all(map(_is_known, branches_of(attention).values()))


def _is_known(branch: Any) -> bool:
    if isinstance(branch, Mixer):
        return FastDelayedRule.serves(branch)
    kind: Any = type(branch).__bases__[1] if isinstance(branch, (PackedSoftmax, WindowAttention)) else object
    family = family_of(behind(FarSoftmax, kind), "Attention")
    if family is None or not family.plain_attention:
        return False
    return branch.cache_bits in (8, 4) and type(branch.o_proj) is nn.Linear


class FastPacked:
    """Stands for the attention in calls without gradients, with the signature of its forward.

    Args:
        attention: of a kind that `is_packed`.
        may_move: whether its weights may be moved, see `MergedProjection`.
    """

    takes_prompt_length = True
    has_step = True  # as in `FastMixer`

    def __init__(self, attention: Any, may_move: bool) -> None:
        branches = branches_of(attention).values()
        self._readers = [_readers(one) for one in branches]
        linears = [linear for readers in self._readers for linear in readers if linear is not None]
        self._project = MergedProjection(linears, may_move)
        self._heads = [
            FastDelayedRule.of(one, may_move=False) if isinstance(one, Mixer) else FastSoftmaxHeads(one)
            for one in branches
        ]
        self._output_layers = [one.o_proj for one in branches]
        self._module: Any = self._heads[0] if isinstance(attention, Mixer) else attention  # for all other calls

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cu_seq_lens_q: Tensor | None = None,
        padding: Tensor | None = None,
        prompt_length: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], None); `prompt_length` as in
        `FastDecoder`."""
        length = hidden_states.shape[1]
        cache = given_cache(past_key_values, kwargs)
        view = cache if isinstance(cache, CacheView) else None
        parts = self._parts(cache if view is None else view.layer)
        if parts and all(part is None or _is_simple(part, length) for part in parts):
            seen = 0 if parts[0] is None else parts[0].get_seq_length()
            masked = padding_in(attention_mask, padding, length, seen)
            bounds = boundaries_in(cu_seq_lens_q, length, view or parts[0])
            if masked is None and (bounds is None or view is not None):
                calls = [LayerCall(part, None, bounds, view, prompt_length) for part in parts]
                return self._output(hidden_states, position_embeddings, calls), None
        return self._module(  # type: ignore[no-any-return]
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=cache,
            cu_seq_lens_q=cu_seq_lens_q,
            padding=padding,
            **kwargs,
        )

    def _parts(self, cache: Any) -> Sequence[MixerCacheLayer | None]:
        """The layer's part of a cache, or None without one, for each branch; empty if the cache is of another kind."""
        if cache is None:
            return [None] * len(self._heads)
        own = self._module.place_cache(cache)
        parts = list(getattr(own, "parts", {"": own}).values())
        fit = all(part.unmovable is None and (not part.state or "key_codes" in part.state) for part in parts)
        return parts if fit else []

    def _output(self, x: Tensor, angles: Angles, calls: Sequence[LayerCall]) -> Tensor:
        """A prompt, several in one row or one more token, x [B, T, hidden] -> [B, T, hidden], with a call per branch.

        The parts of the cache take a token in place; heads without a window get larger tensors every 32 tokens.
        """
        outputs = iter(self._project(x))
        branches = []
        for heads, readers, call in zip(self._heads, self._readers, calls, strict=True):
            own = [None if linear is None else next(outputs) for linear in readers]
            branches.append(functools.partial(heads.attended, x, own, angles, call))
        attended = []
        for call, (output, state) in zip(calls, two_streams(branches, x.device), strict=True):
            attended.append(output.flatten(2))
            if call.cache is not None:
                call.cache.advance(x.shape[1], state)
        first, *others = self._output_layers
        total: Tensor = first(attended[0])
        for layer, one in zip(others, attended[1:], strict=True):
            total.flatten(0, 1).addmm_(one.flatten(0, 1), layer.weight.t())  # no bias: head_split.py
        return total


def _readers(branch: Any) -> Sequence[nn.Module | None]:
    """The linear layers that read the input of one kind of heads; None for one that a mixer lacks."""
    return branch.readers if isinstance(branch, Mixer) else [getattr(branch, name) for name in QKV]


def _is_simple(part: MixerCacheLayer, length: int) -> bool:
    """Whether a call of `length` tokens is the first, or a step that may change the part in place."""
    return not part.record_past and (part.may_change if length == 1 else not part.is_initialized)


class FastSoftmaxHeads:
    """Softmax attention of one kind of heads, to all tokens or in a window."""

    def __init__(self, attention: nn.Module) -> None:
        self._attention: Any = with_children(attention, **fast_norms(attention))

    def attended(self, x: Tensor, outputs: Sequence[Any], angles: Angles, call: LayerCall) -> tuple[Tensor, State]:
        """The attention [B, T, heads, D] of a prompt or a step, before `o_proj`, and the new state.

        Args:
            x: the layer's input [B, T, hidden].
            outputs: of the linear layers that read it, for q, k and v [B, T, heads*D].
            call: without padding; a step changes its cache in place.
        """
        attention, cache = self._attention, call.cache
        q, k, v = (y.unflatten(-1, (-1, attention.head_dim)) for y in outputs)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        q, k = (y if norm is None else norm(y) for norm, y in zip(norms, (q, k), strict=True))
        scale = turn = None
        if isinstance(attention, WindowAttention):
            angles, turn = window_angles(angles, attention.sink_bound, cache, q.shape[1])
        else:
            angles, scale = whole_angles(angles)
        if scale is not None:
            q = (q * scale[:, :, None, None]).to(q.dtype)
        if cache is not None and cache.state:
            seen = int(cache.get_seq_length())
            held = QuantisedKVCache(
                attention.cache_spec,
                cache.state,
                None,
                seen,
                in_place=True,
                state_indices=call.state_indices,
                pages=call.pages,
                turn=turn,
            )
            output, _ = held.step(q, k, v, attention.scaling, None, *angles)
            return output, held.state
        cos, sin = angles
        q, k, v = (part.flatten(-2) for part in (q, k, v))
        rotated = prompt_inputs.unchecked(PromptInputsCall(q, k, v, attention.head_dim, cos=cos, sin=sin))
        held = QuantisedKVCache(
            attention.cache_spec,
            {},
            None,
            keep_state=call.keep_state,
            lengths=call.lengths,
            prompt_length=call.prompt_length,
            cu_seqlens=call.cu_seqlens,
            turn=turn,
        )
        output, _ = held.attend(rotated.q, rotated.k, rotated.v, attention.scaling, None)
        return output, held.state


class FastDelayedRule(FastDeltaRule):
    """A window and a state of what has left it: whole prompts without padding, a server's parts of prompts, and steps;
    alone it is a layer."""

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

    def attended(
        self, x: Tensor, outputs: Sequence[Tensor | None], angles: Angles, call: LayerCall
    ) -> tuple[Tensor, State]:
        """As `FastSoftmaxHeads.attended`, from the outputs of `readers`."""
        return self.attend(self.projected(x, outputs), angles, call)

    def attend(self, projected: Projected, position_embeddings: Angles | None, call: LayerCall) -> tuple[Tensor, State]:
        """As in the base class; a step changes the state in the cache in place."""
        if call.padding is None:
            if call.state is None and (call.cu_seqlens is None or call.lengths is not None):
                return self._prompt(projected, position_embeddings, call)
            if projected.x.shape[1] == 1 and call.cache is not None and call.cache.may_change:
                return self._step(projected, position_embeddings, call), call.cache.state
            if call.view is not None:
                return self._part(projected, position_embeddings, call)
        return Mixer.attend(self, projected, position_embeddings, call)  # type: ignore[arg-type]

    def _prompt(
        self, projected: Projected, position_embeddings: Angles | None, call: LayerCall
    ) -> tuple[Tensor, State]:
        """`attend` of whole sequences [B, T, ...]: the window's attention, then the reads of all groups but the first N
        [B, T - 32 N, HO, D], and the mixture of both.

        In a row of several sequences, the queries of the first N groups of a later one read the state of the one before
        it; nothing of that enters the mixture.
        """
        branch, length, bounds, longest = self.window_branch, call.prompt_length, call.cu_seqlens, call.longest
        assert branch is not None
        assert position_embeddings is not None
        q, k, v, turn = self._rotated(projected, position_embeddings, call)
        k, v, seen, kept = quantised_prompt(branch.cache_spec, k, v, call.keep_state, length, bounds, longest)
        numbers = None if bounds is None else branch.tokens(q, call).numbers
        window_output = WindowOutput(*branch.attend_rounded(q, k, v, seen, turn, bounds, longest), numbers)

        logits, hidden = self.step_gates(projected)[:4], branch.window - 1
        rest = branch.groups, branch.sinks, length, self.max_strength, bounds, longest
        g, beta, *waiting = group_gates.unchecked(GroupGatesCall(*logits, *rest))  # type: ignore[arg-type]
        if g.shape[1]:
            bounds = None if bounds is None else bounds.clamp_max(g.shape[1])
            reads, memory = self._reads(q[:, hidden:], seen, g, beta, None, call.keep_state, bounds)
        else:
            reads, memory = q[:, :0], g.new_zeros(len(waiting[0]), *self.state_shape().shape)
        output = mixture(branch, projected.mixing_logits, window_output, reads, projected.gate, self.norm)  # type: ignore[arg-type]
        if not call.keep_state:
            return output, {}
        assert memory is not None
        gates = {f"gate_{i}": gate for i, gate in enumerate(waiting)}
        return output, stored_memory(self, {"state": self.rounded(memory)}) | kept | gates

    def _part(self, projected: Projected, position_embeddings: Angles | None, call: LayerCall) -> tuple[Tensor, State]:
        """`attend` of more tokens of a server's sequence [1, T, ...]: as `_prompt`, from the first group on that is not
        in the state."""
        branch, state, length = self.window_branch, call.state, projected.x.shape[1]
        assert branch is not None
        assert state is not None
        assert call.cache is not None
        assert position_embeddings is not None
        before = int(call.cache.get_seq_length())
        total, hidden = before + length, branch.window - 1
        first = max((before - 1) // branch.edge * branch.edge - hidden, 0)  # the first token that is not in the state
        q, k, v, turn = self._rotated(projected, position_embeddings, call)
        held = QuantisedKVCache(branch.cache_spec, {name: state[name] for name in NAMES}, None, turn=turn)
        numbers = torch.arange(before + 1, total + 1, device=q.device)[None]
        window_output = WindowOutput(*held.attend(q, k, v, branch.scale, branch.softcap), numbers)
        assert held.seen is not None

        tokens = total - hidden - first  # those from the first on that queries read, or that come before those
        left = (total - 1) // branch.edge * branch.edge - hidden - first
        own, waiting = [], {}
        for i, gate in enumerate(self.gates(projected, None)):
            kept = torch.cat([state[f"gate_{i}"].roll(-before, 1), gate.bfloat16()], dim=1)  # by their numbers
            waiting[f"gate_{i}"] = kept[:, -branch.places :].roll(total, 1)
            if tokens > 0:
                start = branch.places - (before - first)
                gate = F.pad(kept[:, start : start + left].to(gate.dtype), (0, 0, 0, tokens - left))
                if not first:
                    gate[:, : branch.sinks] = 0.0
                own.append(gate)
        if tokens > 0:
            at = before - hidden - first  # of the first query among these tokens; below 0 for queries without a state
            read, memory = F.pad(q, (0, 0, 0, 0, at, 0)), wide(held_memory(self, state)["state"], q)
            reads, new = self._reads(read, held.seen, own[0], own[1], memory, True)
            reads = reads[:, max(at, 0) :]
            assert new is not None
            memory_state = stored_memory(self, {"state": self.rounded(new)})
        else:
            reads, memory_state = q[:, :0], {name: state[name] for name in ("state", SCALE) if name in state}
        output = mixture(branch, projected.mixing_logits, window_output, reads, projected.gate, self.norm)  # type: ignore[arg-type]
        return output, memory_state | held.state | waiting

    def _rotated(
        self, projected: Projected, position_embeddings: Angles, call: LayerCall
    ) -> tuple[Tensor, Tensor, Tensor, PositionEmbeddings | None]:
        """q, k, v [B, T, heads, D] as the window sees them, and `turn` of `window_angles`."""
        angles, turn = window_angles(position_embeddings, self.sink_bound, call.cache, projected.x.shape[1])
        cos, sin = self.angles(angles)
        rotation = PromptInputsCall(projected.q, projected.k, projected.v, self.head_dim, cos=cos, sin=sin)
        q, k, v, *_ = prompt_inputs.unchecked(rotation)
        return q, k, v, turn

    def _reads(
        self,
        q: Tensor,
        seen: tuple[Tensor, Tensor],
        g: Tensor,
        beta: Tensor,
        memory: Tensor | None,
        keep_state: bool,
        bounds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The rule on as many keys and values as there are gates, from the first that are `seen`: the reads of q, and
        the state after them."""
        keys, values = (part[:, : g.shape[1]].flatten(2) for part in seen)
        read, keys, values = map(self.split_heads, self.repeated(q.flatten(2), keys, values))
        rule = GroupRuleCall(read, keys, values, g, beta, None, memory, keep_state, True, bounds)
        return chunk_group_gated_delta_rule.unchecked(rule)

    def _step(self, projected: Projected, position_embeddings: Angles | None, call: LayerCall) -> Tensor:
        """`attend` of one more token: the output [B, 1, HO, D]."""
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
