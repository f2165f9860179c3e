"""The base of the mixers with a recurrent state.

A mixer takes the place of a decoder layer's softmax attention. `Mixer` owns everything around the recurrence, in this
order:

    project    projections, learned q/k norms
    attend     inputs      short convolution, rotary embedding, offset of the keys, activation
               gates, mix  the mixer's own
               finished    output norm and gate, mixture with the window, if any
    o_proj     output projection

with padding, packed sequences and the cache. The window reads q and k after norms and rotary embedding alone, and v as
projected. Where the state holds what has left the window, the default, `attend` is `delayed` of `delayed_state.py`.

This is the plain form, for training and for whoever calls a layer alone; the classes of `deltanet_hf/fast` override
single steps, which they compute without gradients by fewer launches. To add a mixer, see docs/contributing.md.

Shapes in comments: B batch, T tokens, D head size; HQ, HK, HV heads of q, k and v; HO heads of the output; C channels
of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache.argument import given_cache
from deltanet_hf.mixers.cache.cache_layer import cache_layer
from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec, held_bytes
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State, TensorShape
from deltanet_hf.mixers.layer.attention_shape import FAITHFUL, AttentionShape, MixerProjections
from deltanet_hf.mixers.layer.delayed_state import delayed, read_groups, read_rows, waiting_shapes
from deltanet_hf.mixers.layer.layer_call import CacheView, LayerCall, MixCall, Projected, recorded
from deltanet_hf.mixers.layer.layer_kind import LayerKind, PositionEmbeddings
from deltanet_hf.mixers.layer.parts import GatedRMSNorm, KeyOffset, Part, ShortConv, linear_products
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from deltanet_kernels.common.heads import repeated
from deltanet_kernels.prompt.calls import PromptInputs


class Mixer(LayerKind, nn.Module):
    """Base of the mixers with a recurrent state; a drop-in for a decoder layer's `self_attn`.

    A subclass defines `add_gates`, `gates`, `mix` and `recurrent_shapes`, and may define `projected` (more inputs than
    one key and value per token) and `start_from_scratch`.

    Args:
        shape: the attention that it replaces (its weights are not copied; the converter does that).
        settings: its settings.
        layer_idx: index of the decoder layer.
    """

    Settings: ClassVar[type[MixerProjections]] = MixerProjections
    has_state: ClassVar[bool] = True
    rearranges_weights: ClassVar[bool] = True
    may_delay: ClassVar[bool] = True
    """Whether the rule can have a state of what has left the window: a token writes its own key and value once, and the
    read depends on query and state alone."""
    sink_bound: int | None = None  # as in `WindowAttention`

    def __init__(self, shape: AttentionShape, settings: MixerProjections, layer_idx: int) -> None:
        super().__init__()
        if settings.delayed and not self.may_delay:
            raise ValueError(f"delayed: got true, but the state of {self.name} reads every token as it comes")
        if shape.family_window is not None:
            settings = settings.of_sliding_layer()
        self.settings, self.layer_idx, self.head_dim = settings, layer_idx, shape.head_dim
        self.num_heads = max(shape.num_q_heads, shape.num_v_heads)  # of the output
        self.num_states = shape.num_v_heads
        self.kv_repeats = shape.kv_repeats
        self._rotate, self._half_angles = shape.rotate, shape.half_angles
        hidden, head_dim = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(hidden, shape.num_q_heads * head_dim, bias=shape.q_bias)
        self.k_proj = nn.Linear(hidden, shape.num_k_heads // shape.kv_repeats * head_dim, bias=shape.k_bias)
        self.v_proj = nn.Linear(hidden, shape.num_v_heads // shape.kv_repeats * head_dim, bias=shape.v_bias)
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=shape.o_bias)
        self.q_norm, self.k_norm = shape.q_norm, shape.k_norm
        self._norms_all_heads = shape.q_norm is not None and shape.q_norm.get_parameter("weight").numel() != head_dim
        self.conv1d = ShortConv(self.conv_channels, settings.conv_size) if settings.conv_size else None
        self.k_offset = KeyOffset(shape.num_k_heads, head_dim) if settings.k_offset else None
        self.add_gates()
        self.g_down = self.g_proj = None
        if settings.output_gate:
            rank = settings.output_gate_rank
            self.g_down = nn.Linear(hidden, rank, bias=False) if rank else None
            self.g_proj = nn.Linear(rank or hidden, self.num_heads * head_dim, bias=settings.gate_bias)
        self.norm = None
        if settings.output_norm != "none":
            weight = (head_dim,) if settings.output_norm == "shared" else (self.num_heads, head_dim)
            self.norm = GatedRMSNorm(weight, shape.norm_eps)
        self.window_branch = WindowBranch(shape, settings) if settings.window else None

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixerProjections:
        """As in the base class.

        Without SiLU on q and k a model that is distilled on 10M tokens or more comes closer to its teacher; with it the
        untrained model is the better one (docs/research/four-bits.md).
        """
        cls.only_faithful(profile)
        return cls.Settings(**{**FAITHFUL, "qk_activation": "none" if training else "silu"})

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        return cls(AttentionShape.of(attention, config, settings, layer_idx), settings, layer_idx)

    @classmethod
    def recurrent_settings(cls, settings: Any) -> Any:
        return settings

    @property
    def softmax_parts(self) -> list[tuple[Any, int]]:
        return [] if self.window_branch is None else [(self.window_branch, self.window_branch.kv_heads)]

    @property
    def window_tokens(self) -> int | None:
        return None if self.window_branch is None else self.window_branch.window

    @property
    def reads_further(self) -> bool:  # type: ignore[override]
        return self.delays

    @property
    def sink_reach(self) -> int:
        assert self.window_branch is not None
        return self.window_branch.places + self.window_branch.sinks

    # What a subclass says.

    @property
    def conv_channels(self) -> int:
        """C: channels of the convolution: those of q, k and v as the states read them, or of k alone."""
        k, v = (self.writes_per_token * self.kv_repeats * part.out_features for part in (self.k_proj, self.v_proj))
        return k if self.settings.conv_on == "k" else self.q_proj.out_features + k + v

    def angles(self, position_embeddings: PositionEmbeddings | None) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin as operators take them, with a number per channel; None without a rotary embedding.

        Every family's `apply_rotary_pos_emb` turns the halves of the leading channels.
        """
        if self._rotate is None:
            return None, None
        assert position_embeddings is not None
        cos, sin = position_embeddings
        return (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)) if self._half_angles else (cos, sin)

    @property
    def writes_per_token(self) -> int:
        """Keys and values that a token gives each state."""
        return 1

    def add_gates(self) -> None:
        """Make the modules that `gates` uses."""
        raise NotImplementedError

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Everything else that the recurrence reads, from the layer's input and its projections.

        Args:
            projected: of the call.
            padding: [B, T] bool, True at tokens that are to leave the state alone; None for no padding.

        Returns:
            Tensors [B, T, ...].
        """
        raise NotImplementedError

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        """The recurrence: outputs [B, T, HO, D], and the new state (empty unless `call.keep_state`)."""
        raise NotImplementedError

    def mix_groups(self, call: MixCall) -> tuple[Tensor, State]:
        """`mix` of tokens in groups of 32, in which queries of a group read the state before its writes."""
        return read_groups(self.mix, call, QuantisedCacheSpec.group_size)

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        """The recurrent state of one sequence."""
        raise NotImplementedError

    def start_from_scratch(self, spread: float) -> None:
        """Give everything that the teacher does not have the start of a model trained from scratch.

        Parts begin at their own start; projections are drawn with the standard deviation `spread`, biases are zero.
        """
        for module in self.modules():
            if isinstance(module, Part):
                module.reset_parameters()
        for name, linear in self.named_modules():
            if isinstance(linear, nn.Linear) and name not in ("q_proj", "k_proj", "v_proj", "o_proj"):
                with torch.no_grad():
                    linear.weight.copy_(torch.randn(linear.weight.shape) * spread)
                    if linear.bias is not None:
                        linear.bias.zero_()

    # What all share.

    @property
    def full_title(self) -> str:
        if self.window_branch is None:
            return self.title
        return f"{self.title} + window {self.window_branch.window}"

    def use_cache_bits(self, bits: int) -> None:
        """Of the window; a mixer without one keeps no keys and values.

        Raises:
            UserError: numbers of sinks that the packed form does not have.
        """
        if self.window_branch is not None:
            self.window_branch.cache_bits = bits
            if bits < 16:
                _ = self.window_branch.cache_spec

    def place_cache(self, cache: Cache) -> MixerCacheLayer:
        return cache_layer(cache, self.layer_idx, self.name, self.cache_class)

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        shapes = self.recurrent_shapes()
        if self.conv1d is not None:
            shapes["conv_tail"] = TensorShape((self.conv_channels, self.settings.conv_size - 1), dtype)
        if self.window_branch is not None:
            shapes |= self.window_branch.state_shapes(dtype)
            if self.window_branch.delayed:
                shapes |= waiting_shapes(self)
        return shapes

    def stored_bytes(self, dtype: torch.dtype, tokens: int, bits: int) -> int:
        branch = self.window_branch
        if branch is None:
            return self.state_bytes(dtype)
        window = held_bytes(branch.kv_heads, branch.head_dim, tokens, bits, dtype, branch.window, branch.sinks)
        shapes = self.state_shapes(dtype)
        return window + sum(shapes[name].nbytes for name in shapes.keys() - set(branch.state_names))

    def project_qkv(
        self, hidden_states: Tensor, position_embeddings: PositionEmbeddings | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads, D] as softmax attention would see them: no convolution, offset or activation.

        Keys and values are repeated to the heads that the states read.
        """
        return self.rotated(*self.repeated(*self.of_teacher(self.project(hidden_states))), position_embeddings)

    @property
    def readers(self) -> tuple[Any, ...]:
        """The linear layers that read the layer's input, in the order of `Projected`; None for those it lacks."""
        gate = self.g_proj if self.g_down is None else self.g_down
        mixing = None if self.window_branch is None else self.window_branch.share_proj
        a, b = getattr(self, "a_proj", None), getattr(self, "b_proj", None)
        return self.q_proj, self.k_proj, self.v_proj, gate, a, b, mixing

    def project(self, x: Tensor) -> Projected:
        """The projections of x [B, T, hidden], zeros at padding."""
        return self.projected(x, linear_products(x, self.readers))

    def projected(self, x: Tensor, outputs: Sequence[Tensor | None]) -> Projected:
        """The projections of x, from the outputs [B, T, ...] of the `readers`."""
        q, k, v, gate, a, b, mixing_logits = outputs
        assert q is not None
        assert k is not None
        assert v is not None
        q, k = self.normalise(q, self.q_norm), self.normalise(k, self.k_norm)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast learned norms give float32
        if self.g_down is not None and self.g_proj is not None:
            gate = self.g_proj(gate)
        gate = None if gate is None else self.split_heads(gate)
        return Projected(x, q, k, v, gate, a, b, mixing_logits)

    def repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Repeats the heads of k and v [B, T, heads*D] for the states that share their projections."""
        size, times = self.head_dim, self.kv_repeats
        return q, repeated(k, size, times), repeated(v, size, times)

    def normalise(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """The learned norm of q or k [B, T, heads*D], per head or over all heads."""
        if norm is None:
            return x
        return norm(x) if self._norms_all_heads else norm(self.split_heads(x)).flatten(-2)

    def forward(
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
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], None).

        Where there is an `attention_mask` (2D or 4D), padding is read from it, or from `padding` ([B, T] bool, True at
        padding), which `announce_padding` took from the same mask. Packed sequences come from `cu_seq_lens_q` ([N + 1]
        boundaries over the B*T tokens), the state from `past_key_values` or `cache`, whose layer it replaces by its
        own. `prompt_length` is given where `takes_prompt_length` says so, as in `FastDecoder`.

        Raises:
            ValueError: a mask that cannot be read, or packed sequences together with a cache.
        """
        length, given = hidden_states.shape[1], given_cache(past_key_values, kwargs)
        call = LayerCall.of(self, length, attention_mask, given, cu_seq_lens_q, padding, prompt_length)
        if call.is_recorded:
            return recorded(self, call, hidden_states, position_embeddings), None
        projected = self.project(self.masked(hidden_states, call))
        output, new_state = self.attend(projected, position_embeddings, call)
        if call.cache is not None:
            call.cache.advance(length, new_state)
        return self.o_proj(output.flatten(-2)), None

    def masked(self, x: Tensor, call: LayerCall) -> Tensor:
        """x [B, T, hidden] with zeros at padding."""
        return x if call.padding is None else x.masked_fill(call.padding.unsqueeze(-1), 0.0)

    def attend(
        self, projected: Projected, position_embeddings: PositionEmbeddings | None, call: LayerCall
    ) -> tuple[Tensor, State]:
        """The output before `o_proj` [B, T, HO, D], and the new state (empty unless it is kept)."""
        if self.delays:
            return delayed(self, projected, position_embeddings, call)
        unwritten = call.unwritten(projected.x)
        q, k, v, *_, conv_tail = inputs = self.inputs(projected, position_embeddings, call)
        gates = self.gates(projected, unwritten)
        mixing = MixCall(q, k, v, gates, unwritten, call.state, call.keep_state, call.cu_seqlens)
        output, new_state = self.mix(mixing if call.cu_seqlens is None else mixing.in_one_row())
        output = output.view(*projected.x.shape[:2], self.num_heads, self.head_dim)
        output, window_state = self.finished(output, projected, inputs, call)
        if conv_tail is not None:
            new_state = {**new_state, "conv_tail": conv_tail}
        return output, {**new_state, **window_state}

    def inputs(
        self, projected: Projected, position_embeddings: PositionEmbeddings | None, call: LayerCall
    ) -> PromptInputs:
        """The inputs of the recurrence and of the window, if there is one, from the projections."""
        q, k, v, conv_tail = self.convolved(*self.repeated(projected.q, projected.k, projected.v), call)
        q, k, v = self.activated(*self.rotated(q, k, v, position_embeddings))
        window_q = window_k = None
        if self.window_branch is not None:
            window_q, window_k, _ = self.window_inputs(projected, position_embeddings)
        return PromptInputs(q, k, v, window_q, window_k, conv_tail)

    def finished(
        self, output: Tensor, projected: Projected, inputs: PromptInputs, call: LayerCall
    ) -> tuple[Tensor, State]:
        """Norm and gate of the recurrence's output [B, T, HO, D], and its mixture with the window, if there is one.

        Returns the output [B, T, HO, D], and the window's part of the new state.
        """
        output = self.gated_norm(output, projected.gate)
        if self.window_branch is None:
            return output, {}
        v = self.window_values(projected)
        return self.window_branch(projected.mixing_logits, inputs.window_q, inputs.window_k, v, output, call)  # type: ignore[no-any-return]

    @property
    def delays(self) -> bool:
        """Whether the state holds what has left the window, and nothing else."""
        return self.window_branch is not None and self.window_branch.delayed

    def reads(self, call: MixCall) -> Tensor:
        """The reads [B, T, HO, D] of whole sequences without padding, one a row."""
        if self.window_branch is None or not self.delays:
            return self.mix(call)[0]
        return read_rows(self.mix_groups, call, self.window_branch)[0]

    def activated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads, D] with the keys' offset and the activations."""
        if self.k_offset is not None:
            k = self.k_offset(k)
        if self.settings.qk_activation == "silu":
            q, k = F.silu(q), F.silu(k)
        if self.settings.v_activation == "silu":
            v = F.silu(v)
        return q, k, v

    def convolved(
        self, q: Tensor, k: Tensor, v: Tensor, call: LayerCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v [B, T, heads*D] after the short convolution, and its new tail, if there is one to keep."""
        if self.conv1d is None:
            return q, k, v, None
        before = None if call.state is None else call.state["conv_tail"]
        context = call.padding, before, call.keep_state, call.cu_seqlens
        if self.settings.conv_on == "k":
            (k,), tail = self.conv1d((k,), *context)
        else:
            (q, k, v), tail = self.conv1d((q, k, v), *context)
        return q, k, v, tail

    def split_heads(self, x: Tensor) -> Tensor:
        """x [B, T, heads*D] -> [B, T, heads, D]."""
        *shape, channels = x.shape
        return x.view(*shape, channels // self.head_dim, self.head_dim)  # quicker than unflatten

    def rotated(
        self, q: Tensor, k: Tensor, v: Tensor, position_embeddings: PositionEmbeddings | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads*D] -> [B, T, heads, D], q and k with the teacher's rotary embedding."""
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
        if self._rotate is not None:
            assert position_embeddings is not None
            cos, sin = position_embeddings
            q, k = self._rotate(q, k, cos, sin, unsqueeze_dim=2)
            q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast cos and sin may be wider than the projections
        return q, k, v

    def gated_norm(self, output: Tensor, gate: Tensor | None) -> Tensor:
        """Output norm and gate: output and gate [B, T, HO, D] -> [B, T, HO, D]."""
        if self.norm is not None:
            return self.norm(output, gate)  # type: ignore[no-any-return]
        return output if gate is None else output * F.silu(gate)

    def window_inputs(
        self, projected: Projected, position_embeddings: PositionEmbeddings | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads, D] of the window: of k and v the teacher's alone."""
        return self.rotated(*self.of_teacher(projected), position_embeddings)

    def window_values(self, projected: Projected) -> Tensor:
        """v of `window_inputs`."""
        return self.split_heads(self.of_teacher(projected)[2])

    def of_teacher(self, projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads*D] of the teacher's projections, which are the last writes of a token."""
        k, v = projected.k[..., -self.k_proj.out_features :], projected.v[..., -self.v_proj.out_features :]
        return projected.q, k, v
