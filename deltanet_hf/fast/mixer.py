"""A mixer without gradients by few launches: the prefill of a prompt, and a decoding step.

`Mixer.forward` says what a mixer computes, in separate and differentiable operations. Here, the projections of x are
one matrix product, and each learned norm of q and k one kernel. Of a prompt, one kernel computes the gates (those of
Gated DeltaNet), one the inputs of recurrence and window; after the recurrence, one computes norm and gate, or, with a
window, three its attention, its cache and the mixture. Of a step of the gated delta rule, one kernel computes
everything between the projections and the window, another (three in 8 or 4 bits) attends in the window at the same
time, and one mixes. A step of another rule is computed as a prompt of one token.

All else goes through `Mixer.forward`, on a copy of the mixer with the joint product: padded prompts, padded steps of
other rules, several sequences in a row, convolutions of the keys alone, learned sinks; with a window in 8 or 4 bits
padded steps and all steps of other rules, in 3 or 2 bits every step. A state of what has left a window
has kernels of its own (`delayed.py`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.fast.copied import copied
from deltanet_hf.fast.delayed import delayed_prefill, delayed_step, has_kernels
from deltanet_hf.fast.joint import joint_linears
from deltanet_hf.fast.norms import FastNorm, form_of
from deltanet_hf.fast.side_by_side import side_by_side
from deltanet_hf.fast.window import mixture, window_prefill, window_step
from deltanet_hf.mixers.cache.argument import given_cache
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.cache.view import CacheView
from deltanet_hf.mixers.layer.delta_rule import DeltaRule
from deltanet_hf.mixers.layer.layer_call import LayerCall, recorded
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.mix_call import MixCall
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_kernels import gate_values, gated_delta_step_, gated_rms_norm, prompt_inputs
from deltanet_kernels.arguments import LATE, GatedNormCall, RuleCall
from deltanet_kernels.gated_delta_rule.operators import chunk_rule
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputs, PromptInputsCall

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_down", "g_proj", "a_proj", "b_proj")


class FastMixer:
    """Stands for a mixer in calls without gradients, with the signature of its forward.

    Args:
        mixer: a mixer without hooks, adapters or replaced methods.
        may_move: whether its weights may be moved, see `joint_linears`.
    """

    def __init__(self, mixer: Mixer, may_move: bool) -> None:
        self.layer: Any = _with_fast_parts(mixer, may_move)
        self.settings, self.cache_class = mixer.settings, mixer.cache_class
        conv = mixer.conv1d
        self._conv_weight = None if conv is None else conv.weight.detach().squeeze(1)
        self._k_offset = None if mixer.k_offset is None else mixer.k_offset.weight
        branch = mixer.window_branch
        bits = 16 if branch is None else branch.cache_bits
        of_keys_alone = conv is not None and mixer.settings.conv_on == "k"
        plain = branch is None or (branch.learned_sinks is None and not branch.delayed)
        self._has_prefill, self._delays = not of_keys_alone and plain, has_kernels(mixer)
        self._is_gated_delta_rule = mixer.is_gated_delta_rule
        # A step takes the `slots` of a server's cache too. 3 and 2 bits have no packed form.
        self.has_step = self._delays or (self._has_prefill and bits >= 4 and self._is_gated_delta_rule)
        self._has_padded_step = self.has_step and bits == 16
        own_heads = mixer.k_proj.out_features // mixer.head_dim
        # Whether the window reads other queries and keys than the state: `prompt_inputs` then returns them too.
        differ = conv is not None or self._k_offset is not None or self._qk_silu or mixer.kv_repeats > 1
        self._window_kv_heads = own_heads if mixer.window_branch is not None else 0
        self._separate_window_heads = self._window_kv_heads if differ else 0

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: PositionEmbeddings | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | MixerCacheLayer | CacheView | None = None,
        cu_seq_lens_q: Tensor | None = None,
        padding: Tensor | None = None,
        prompt_length: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As `Mixer.forward`; `prompt_length` as in `FastDecoder`."""
        layer, x, length = self.layer, hidden_states, hidden_states.shape[1]
        given = given_cache(past_key_values, kwargs)
        call = LayerCall.of(layer, length, attention_mask, given, cu_seq_lens_q, padding)
        if call.is_recorded:
            return recorded(self, call, x, position_embeddings), None
        cache, padding, cu_seqlens = call.cache, call.padding, call.cu_seqlens
        has_step = self.has_step if padding is None else self._has_padded_step
        if length == 1 and has_step and cache is not None and cache.may_change:
            return self.step(x, position_embeddings, cache, padding, call.slots), None
        if self._delays and padding is None and cu_seqlens is None and call.state is None:
            inputs = self._inputs(layer.project(x), position_embeddings, None, False)
            return layer.o_proj(delayed_prefill(layer, x, inputs, call, prompt_length).flatten(-2)), None
        if layer.delays and padding is None:
            return layer.with_delayed_state(x, position_embeddings, replace(call, prompt_length=prompt_length)), None
        if padding is None and cu_seqlens is None and self._has_prefill:
            return self.prefill(x, position_embeddings, call, prompt_length), None
        return Mixer.forward(layer, x, position_embeddings, attention_mask, given, cu_seqlens, padding)  # type: ignore[arg-type]

    @property
    def takes_prompt_length(self) -> bool:
        return self._has_prefill or self.layer.delays

    def prefill(
        self,
        x: Tensor,
        position_embeddings: PositionEmbeddings | None,
        call: LayerCall,
        prompt_length: Tensor | None,
    ) -> Tensor:
        """Tokens without padding, or with padding after the first `prompt_length` tokens of a sequence.

        x [B, T, hidden] -> [B, T, hidden].
        """
        layer, state, keep = self.layer, call.state, call.keep_state
        padding = None if prompt_length is None else _after(prompt_length, x)
        parts, gates, output_gate = layer.project(x), layer.gates(x, padding), layer.output_gate(x)
        inputs = self._inputs(parts, position_embeddings, state, keep)
        if prompt_length is not None and inputs.tail is not None:
            inputs = inputs._replace(tail=self._tail(parts, prompt_length))
        output, new_state = self._mix(inputs, gates, padding, state, keep)
        output = output.view(*x.shape[:2], layer.num_heads, layer.head_dim)
        if inputs.tail is not None:
            new_state = {**new_state, "conv_tail": inputs.tail}
        if layer.window_branch is not None:
            q, k, v = inputs.window_q, inputs.window_k, layer.split_heads(layer.own_channels(parts[2], layer.v_proj))
            assert q is not None
            assert k is not None
            output, kept = window_prefill(
                layer.window_branch, x, q, k, v, output, output_gate, layer.norm, call, prompt_length
            )
            new_state = {**new_state, **kept}
        elif layer.norm is not None:
            output = gated_rms_norm.unchecked(GatedNormCall(output, output_gate, layer.norm.weight, layer.norm.eps))
        else:
            output = layer.gated_norm(output, output_gate)
        if call.cache is not None:
            call.cache.advance(x.shape[1], new_state)
        return layer.o_proj(output.flatten(-2))  # type: ignore[no-any-return]

    def step(
        self,
        x: Tensor,
        position_embeddings: PositionEmbeddings | None,
        cache: MixerCacheLayer,
        padding: Tensor | None,
        slots: Tensor | None,
    ) -> Tensor:
        """One more token, x [B, 1, hidden] -> [B, 1, hidden], with the state in the cache changed in place.

        The sequences are in the rows `slots` [B] of its tensors, where these are given.
        """
        layer, state = self.layer, cache.state
        if self._delays:
            return layer.o_proj(delayed_step(layer, x, position_embeddings, cache).flatten(-2))  # type: ignore[no-any-return]
        tail = state["conv_tail"].clone() if padding is not None and self._conv_weight is not None else None
        q, k, v = layer.project(x)
        rule_gates, output_gate = layer.step_gates(x), layer.output_gate(x)
        cos, sin = self.layer.angles(position_embeddings)
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
                self._conv_weight,
                state.get("conv_tail"),
                output_gate,
                None if layer.norm is None else layer.norm.weight,
                padding,
                cos,
                sin,
                eps=1e-6 if layer.norm is None else layer.norm.eps,
                qk_silu=self._qk_silu,
                v_silu=self._v_silu,
                k_offset=self._k_offset,
                allow_neg_eigval=self.settings.allow_neg_eigval,
                use_beta_sigmoid_in_kernel=rule_gates.sigmoid,
                erase=layer.erase,
                kv_repeats=layer.kv_repeats,
                slots=slots,
                **late,
            )

        branch = layer.window_branch
        if branch is None:
            output = recur()
        else:
            own_q, own_k, own_v = map(layer.split_heads, (q, k, v))
            far, near = side_by_side(
                recur, lambda: window_step(branch, own_q, own_k, own_v, cache, padding, cos, sin, slots), x.device
            )
            output = mixture(branch, x, near.output, near.lse, far, near.numbers)
        if tail is not None and padding is not None:  # the kernels move the tail of all rows
            state["conv_tail"].copy_(tail.where(padding.unsqueeze(-1), state["conv_tail"]))
        cache.count(1)
        return layer.o_proj(output.flatten(-2))  # type: ignore[no-any-return]

    @property
    def _qk_silu(self) -> bool:
        return bool(self.settings.qk_activation == "silu")

    @property
    def _v_silu(self) -> bool:
        return bool(self.settings.v_activation == "silu")

    def _inputs(
        self,
        parts: tuple[Tensor, Tensor, Tensor],
        position_embeddings: PositionEmbeddings | None,
        state: State | None,
        keep_state: bool,
    ) -> PromptInputs:
        """The inputs of the recurrence and of the window, from q, k, v [B, T, heads*D], in one kernel."""
        cos, sin = self.layer.angles(position_embeddings)
        head_dim = self.layer.head_dim
        call = PromptInputsCall(
            *parts,
            head_dim,
            conv_weight=self._conv_weight,
            conv_tail=None if self._conv_weight is None or state is None else state["conv_tail"],
            cos=cos,
            sin=sin,
            k_offset=self._k_offset,
            qk_silu=self._qk_silu,
            v_silu=self._v_silu,
            window_heads=self._separate_window_heads,
            output_tail=self._conv_weight is not None and keep_state,
            kv_repeats=self.layer.kv_repeats,
        )
        # The state comes with the cache and the rotation with the call: from elsewhere than the layer.
        if state is not None or not _rotates(parts[0], cos, sin, head_dim):
            prompt_inputs.check(call)
        inputs = prompt_inputs.unchecked(call)
        if self._window_kv_heads and not self._separate_window_heads:
            inputs = inputs._replace(window_q=inputs.q, window_k=inputs.k[:, :, -self._window_kv_heads :])
        return inputs

    def _tail(self, parts: tuple[Tensor, Tensor, Tensor], prompt_length: Tensor) -> Tensor:
        """The last inputs of the convolution [B, C, W-1] before padding; zeros before the first token."""
        assert self._conv_weight is not None
        earlier = self._conv_weight.shape[1] - 1
        places = prompt_length + torch.arange(-earlier, 0, device=prompt_length.device)
        q, k, v = self.layer.repeated(*(x.index_select(1, places.clamp_min(0)) for x in parts))
        tail = torch.cat([q, k, v], dim=-1).masked_fill((places < 0).unsqueeze(-1), 0)
        return tail.transpose(1, 2).contiguous()

    def _mix(
        self,
        inputs: PromptInputs,
        gates: tuple[Tensor, ...],
        padding: Tensor | None,
        state: State | None,
        keep_state: bool,
    ) -> tuple[Tensor, State]:
        q, k, v = inputs[:3]
        if state is not None or not self._is_gated_delta_rule or q.shape[1] == 1:
            return self.layer.mix(MixCall(q, k, v, gates, padding, state, keep_state))  # type: ignore[no-any-return]
        g, beta = gates
        call = RuleCall(q, k, v, g, beta, None, None, keep_state, True, erase=self.layer.erase)
        output, new_state = chunk_rule.unchecked(call)
        return output, self.layer.stored(new_state, v.dtype)


def _with_fast_parts(mixer: Any, may_move: bool) -> Mixer:
    """A copy of a mixer with joint projections; one kernel each for the norms of q and k, the gates and the mixture."""
    branch = mixer.window_branch
    linears = {name: mixer._modules.get(name) for name in PROJECTIONS}
    if linears["g_down"] is not None:
        linears["g_proj"] = None  # which reads another input
    linears = {name: linear for name, linear in linears.items() if linear is not None}
    shares = [] if branch is None else [branch.share_proj]
    found = joint_linears([*linears.values(), *shares], may_move)
    replaced: dict[str, Any] = dict(zip(linears, found, strict=False))
    if branch is not None:
        fast = copied(branch, share_proj=found[-1])
        replaced["window_branch"] = fast if branch.delayed else copied(fast, mixture=functools.partial(mixture, fast))
    for name in ("q_norm", "k_norm"):
        norm = getattr(mixer, name)
        if norm is not None and form_of(norm) is not None:
            replaced[name] = FastNorm(norm)
    if isinstance(mixer, DeltaRule) and (mixer.decays, mixer.strengths) == ("by token", "sigmoid"):
        decay = mixer.decay
        replaced["gates_of"] = lambda a, b: gate_values.unchecked(
            GateValuesCall(a, b, decay.A_log, decay.dt_bias, mixer.max_strength)
        )
    return copied(mixer, **replaced)


def _after(prompt_length: Tensor, x: Tensor) -> Tensor:
    """[B, T] bool, True at the padding that follows the first `prompt_length` tokens of x [B, T, hidden]."""
    return (torch.arange(x.shape[1], device=x.device) >= prompt_length).expand(x.shape[:2])


def _rotates(q: Tensor, cos: Tensor | None, sin: Tensor | None, head_dim: int) -> bool:
    """Whether the tokens of q [B, T, heads * head_dim], at least one, fit the rotary embedding, if there is one."""
    if 0 in q.shape or cos is None or sin is None:
        return cos is sin and 0 not in q.shape
    if cos.dim() != 3 or cos.shape != sin.shape or not cos.device == sin.device == q.device:
        return False
    rows, tokens, turned = cos.shape
    fits = rows in (1, q.shape[0]) and tokens == q.shape[1] and 0 < turned <= head_dim and turned % 2 == 0
    return fits and cos.is_floating_point() and sin.is_floating_point()
