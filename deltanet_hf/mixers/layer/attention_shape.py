"""The shape of the attention that a mixer replaces, and the settings of everything that surrounds a recurrence."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedConfig

from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.settings import MixerSettings, check_at_least
from deltanet_hf.model_sizes import head_size
from deltanet_hf.model_types import HALF_ANGLES, family_type

Activation = Literal["silu", "none"]
OutputNorm = Literal["none", "shared", "per_head"]
StateDtype = Literal["float32", "bfloat16", "int8"]
ConvolvedParts = Literal["qkv", "k"]
S = TypeVar("S", bound="MixerProjections")


@dataclass(frozen=True)
class MixerProjections(MixerSettings):
    """The settings of everything that surrounds a recurrence; all mixers with a recurrent state share them."""

    expand_kv: bool  # key/value heads repeated to the number of query heads: one state per query head
    rope: bool  # the teacher's rotary embedding on q and k
    qk_norm: bool  # the teacher's learned q/k norms, where it has them
    qkv_bias: bool  # the teacher's biases of the q, k and v projections, where it has them
    conv_size: int  # taps of the causal depthwise convolution; 0 for none
    qk_activation: Activation  # of queries and keys, after the convolution
    v_activation: Activation  # of values, after the convolution
    output_norm: OutputNorm  # RMSNorm over a head's output, its weight shared by the heads or one per head
    output_gate: bool  # multiply by SiLU of a projection of the layer's input
    gate_bias: bool  # biases in the projections of write strength and output gate
    shared_kv: bool = False  # the states of one key/value head share its projections instead of having copies
    k_offset: bool = False  # a learned vector per key head, subtracted from the keys after the rotary embedding
    allow_neg_eigval: bool = False  # write strengths up to 2 instead of 1
    state_dtype: StateDtype = "float32"  # of the state in the cache; the arithmetic is float32
    window: int = 0  # tokens of a softmax window beside the state; 0 for none
    sinks: int = 4  # first tokens of a sequence that the window sees too
    delayed: bool = False  # the state holds what has left the window, not all tokens
    conv_on: ConvolvedParts = "qkv"  # what the convolution acts on
    output_gate_rank: int = 0  # of the output gate's projection; 0 for a full matrix

    def validate(self, where: str) -> None:
        super().validate(where)
        if type(self.conv_size) is not int or self.conv_size not in (0, 2, 3, 4):
            raise ValueError(f"{where}.conv_size: got {self.conv_size!r}, expected 0 (none), 2, 3 or 4")
        if self.state_dtype == "int8" and not self.delayed:
            raise ValueError(f"{where}.state_dtype: got int8, which needs delayed; take float32 or bfloat16")
        check_at_least(where, "window", self.window, 0)
        check_at_least(where, "sinks", self.sinks, 0)
        if self.delayed and not (self.window and self.rope and not self.conv_size):
            needs = "a window, rope (its keys have it) and conv_size 0"
            raise ValueError(f"{where}.delayed: got true, needs {needs}; change these, or set delayed to false")
        check_at_least(where, "output_gate_rank", self.output_gate_rank, 0)
        if self.output_gate_rank and not self.output_gate:
            got = f"{where}.output_gate_rank: got {self.output_gate_rank}"
            raise ValueError(f"{got}, expected 0 because output_gate is false")

    def sized_for(self: S, teacher: PreTrainedConfig) -> S:
        """As in the base class: a wide teacher gets an output gate through as many dimensions as a head."""
        if teacher.hidden_size < WIDE or not self.output_gate:
            return self
        return replace(self, output_gate_rank=head_size(teacher))

    def of_sliding_layer(self: S) -> S:
        """The settings of a layer that slides in the teacher, which sees nothing of what has left its window."""
        if not self.delayed:
            return self
        return replace(self, delayed=False, state_dtype="float32" if self.state_dtype == "float32" else "bfloat16")


FAITHFUL: dict[str, Any] = {
    "expand_kv": True,
    "rope": True,
    "qk_norm": True,
    "qkv_bias": True,
    "conv_size": 4,
    "qk_activation": "none",
    "v_activation": "none",
    "output_norm": "per_head",
    "output_gate": True,
    "gate_bias": True,
    "k_offset": True,
}  # everything that the teacher's attention has, and a convolution that begins as an identity
BESIDE_WINDOW: dict[str, Any] = {
    "window": 256,
    "expand_kv": False,
    "state_dtype": "bfloat16",
    "k_offset": False,
}  # what `NAME+window` changes in NAME's settings: a small state leaves the bytes to the window
DELAYED: dict[str, Any] = {
    "delayed": True,
    "conv_size": 0,  # its tails cost as much as a longer window is worth (docs/research/four-bits.md)
    "state_dtype": "int8",
}  # and where the rule can have a state of what has left the window


WIDE = 2048  # hidden size
"""From here on the output gate is narrow by default: a full matrix is 7% of an 8B layer's matrix products, and it costs
no quality to do without (docs/research/journal-training.md). In a small model its further launch would take as long as
it saves."""


@dataclass(frozen=True)
class AttentionShape:
    """The shape of the attention that a mixer replaces, and the parts of it that have no weights of their own."""

    hidden_size: int
    head_dim: int
    num_q_heads: int
    num_k_heads: int  # that the states read
    num_v_heads: int
    kv_repeats: int = 1  # states that share the projections of one key/value head
    scaling: float | None = None  # of softmax scores; None for D^-0.5
    family_window: int | None = None  # the family's own sliding window, in tokens
    softcap: float | None = None  # C of softmax scores C tanh(s / C); None for no cap
    learned_sinks: bool = False  # one more score per head (`cache/sinks_apart.py`)
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    norm_eps: float = 1e-6
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    rotate: Callable[..., tuple[Tensor, Tensor]] | None = None
    """The family's `apply_rotary_pos_emb`; None for no rotary embedding."""
    half_angles: bool = False  # it takes a number of cos and sin per pair of channels, not per channel

    @classmethod
    def of(cls, attention: Any, config: PreTrainedConfig, settings: MixerProjections, layer_idx: int) -> AttentionShape:
        """Read the shape off a family's attention module.

        Head counts, biases, learned norms and the use of rotary embeddings come from the module that the family's own
        constructor made, so that one mixer serves every family.
        """
        heads: int = config.num_attention_heads
        kv_heads: int = heads if settings.expand_kv else config.num_key_value_heads
        repeats = kv_heads // config.num_key_value_heads if settings.shared_kv else 1
        fused = getattr(attention, "qkv_proj", None)
        bias = [getattr(fused or getattr(attention, f"{n}_proj"), "bias", None) is not None for n in "qkv"]
        q_norm: Any = None
        k_norm: Any = None
        if settings.qk_norm and hasattr(attention, "q_norm"):
            q_norm, k_norm = copy.deepcopy(attention.q_norm), copy.deepcopy(attention.k_norm)
            if q_norm.weight.numel() != attention.head_dim:  # one norm over all heads (OLMo)
                k_norm.weight = nn.Parameter(k_norm.weight.new_ones(kv_heads // repeats * attention.head_dim))
        # SmolLM3 leaves some layers without positions.
        rotates = settings.rope and bool(getattr(attention, "use_rope", True))
        return cls(
            hidden_size=config.hidden_size,
            head_dim=attention.head_dim,
            num_q_heads=heads,
            num_k_heads=kv_heads,
            num_v_heads=kv_heads,
            kv_repeats=repeats,
            scaling=getattr(attention, "scaling", None),
            family_window=sliding_window(config, layer_idx),
            softcap=getattr(attention, "attn_logit_softcapping", None),
            learned_sinks=hasattr(attention, "sinks"),
            q_bias=bias[0] and settings.qkv_bias,
            k_bias=bias[1] and settings.qkv_bias,
            v_bias=bias[2] and settings.qkv_bias,
            o_bias=getattr(attention.o_proj, "bias", None) is not None,
            norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            q_norm=q_norm,
            k_norm=k_norm,
            rotate=sys.modules[type(attention).__module__].apply_rotary_pos_emb if rotates else None,
            half_angles=family_type(config) in HALF_ANGLES,
        )
