"""A mixer with a state of what has left its window, in 8 or 4 bits and without gradients, by few kernels.

`mixers/layer/delayed_state.py` says what is computed. A prompt takes three kernels beside those of the window and of the
recurrence (its inputs, gates, and mixture), a step two beside the window's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_hf.fast.window import mixture, window_step
from deltanet_hf.mixers.cache.fake_quantisation import quantised_attention
from deltanet_hf.mixers.cache.packed_reach import NAMES
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.layer.delayed_layer import SCALE, stored_memory
from deltanet_hf.mixers.layer.delta_rule import DeltaRule
from deltanet_hf.mixers.layer.layer_call import LayerCall
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_kernels import (
    PackedKeyValues,
    chunk_group_gated_delta_rule,
    group_gated_delta_step_,
    group_gates,
    pack_prompt,
    round_tokens,
)
from deltanet_kernels.group_rule.calls import GROUP, GroupGatesCall, GroupRuleCall, GroupStepCall
from deltanet_kernels.packed_cache.calls import PackPromptCall, RoundTokensCall
from deltanet_kernels.packed_cache.layout import PACKED_BITS
from deltanet_kernels.prompt.calls import PromptInputs


def has_kernels(mixer: Mixer) -> bool:
    """Whether these kernels compute the layer: the gated delta rule beside a window of whole groups in 8 or 4 bits."""
    branch, settings = mixer.window_branch, mixer.settings
    if branch is None or not branch.delayed or branch.cache_bits not in PACKED_BITS or not branch.groups:
        return False
    plain = (settings.qk_activation, settings.v_activation) == ("none", "none") and mixer.k_offset is None
    rule = isinstance(mixer, DeltaRule) and mixer.is_gated_delta_rule and mixer.erase == "decayed"
    gates = rule and (mixer.decays, mixer.strengths) == ("by token", "sigmoid")  # type: ignore[attr-defined]
    return plain and gates and branch.learned_sinks is None


def delayed_prefill(layer: Any, x: Tensor, inputs: PromptInputs, call: LayerCall, prompt_length: Tensor | None) -> Tensor:
    """A prompt without padding, x [B, T, hidden] -> [B, T, HO, D]; `prompt_length` as in `FastDecoder`."""
    branch, gates, output_gate = layer.window_branch, layer.step_gates(x), layer.output_gate(x)
    groups, sinks, order = branch.groups, branch.sinks, branch.kept.key_order
    q, k, v = inputs.window_q, inputs.window_k, layer.split_heads(layer.own_channels(inputs.v.flatten(2), layer.v_proj))
    k, v = round_tokens.unchecked(RoundTokensCall(k, v))
    cache, *seen = pack_prompt.unchecked(PackPromptCall(k, v, branch.cache_bits, groups, prompt_length, order))
    held = branch.scale, branch.cache_bits, branch.softcap
    near, lse = quantised_attention(q, k, v, branch.window, sinks, *held, seen, edge=branch.edge)
    g, beta, *waiting = group_gates.unchecked(GroupGatesCall(*gates[:4], groups, sinks, prompt_length, layer.max_strength))
    keys, values = (part[:, : g.shape[1]].repeat_interleave(layer.kv_repeats, 2) for part in seen)
    state: State = {}
    if g.shape[1]:
        rule = GroupRuleCall(inputs.q[:, GROUP * groups :], keys, values, g, beta, None, None, call.keep_state, True)
        far, memory = chunk_group_gated_delta_rule.unchecked(rule)
        far = F.pad(far, (0, 0, 0, 0, GROUP * groups, 0))
    else:
        far, memory = torch.zeros_like(q), q.new_zeros(len(q), layer.num_states, *2 * (layer.head_dim,)).float()
    if call.cache is not None:
        state = dict(zip(NAMES, cache.tensors, strict=True)) | {f"gate_{i}": gate for i, gate in enumerate(waiting)}
        call.cache.advance(x.shape[1], stored_memory(layer, {"state": layer.rounded(memory)}) | state)
    return mixture(branch, x, near, lse, far, None, output_gate, layer.norm)


def delayed_step(
    layer: Any, x: Tensor, position_embeddings: PositionEmbeddings | None, cache: MixerCacheLayer
) -> Tensor:
    """One more token, x [B, 1, hidden] -> [B, 1, HO, D], with the state in the cache changed in place."""
    branch, state = layer.window_branch, cache.state
    q, k, v = map(layer.split_heads, layer.project(x))
    gates, output_gate = layer.step_gates(x), layer.output_gate(x)
    cos, sin = layer.angles(position_embeddings)
    packed = PackedKeyValues(*(state[name] for name in NAMES), branch.kept.key_order)  # type: ignore[call-arg]
    held = state["gate_0"], state["gate_1"], state["state"], state.get(SCALE)
    far = group_gated_delta_step_.unchecked(
        GroupStepCall(q, *gates[:4], packed, *held, branch.sinks, cos, sin, None, layer.max_strength)
    )
    near = window_step(branch, q, k, v, cache, None, cos, sin, None)  # packs a group over the one that has left
    cache.count(1)
    return mixture(branch, x, near.output, near.lse, far, near.numbers, output_gate, layer.norm)
