"""The families of the fast form: the order of their norms, how these round, and which of their parts are plain.

A family's classes are named after it: `LlamaDecoderLayer`, `LlamaRMSNorm`, `LlamaMLP`, `LlamaAttention`. How to add
one: append a row; what a row does not say is computed by the family's own module.
"""

from __future__ import annotations

from typing import NamedTuple


class Norms(NamedTuple):
    """The norms of a decoder layer by name, before and after attention and feed-forward block; None for no norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


class Form(NamedTuple):
    """How a class of norms rounds and multiplies; see `deltanet_kernels.rms_norm`."""

    offset: float
    round_first: bool


class FastFamily(NamedTuple):
    """A family in transformers."""

    norms: Norms
    form: Form
    plain_mlp: bool = False
    """Whether its block is down_proj(act(gate_proj(x)) * up_proj(x))."""
    plain_attention: bool = False
    """Whether its attention says no more than: project, norms of the heads of q and k if there are any, rotate, attend
    by `scaling`, project."""


LAYER, NORM = "DecoderLayer", "RMSNorm"  # parts, as `family_of` knows them

BEFORE = Norms("input_layernorm", None, "post_attention_layernorm", None)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
LLAMA, OLMO, GEMMA = Form(0.0, True), Form(0.0, False), Form(1.0, False)
FAMILIES = {
    "Llama": FastFamily(BEFORE, LLAMA, plain_mlp=True, plain_attention=True),
    "Mistral": FastFamily(BEFORE, LLAMA, plain_mlp=True, plain_attention=True),
    "Qwen2": FastFamily(BEFORE, LLAMA, plain_mlp=True, plain_attention=True),
    "Qwen3": FastFamily(BEFORE, LLAMA, plain_mlp=True, plain_attention=True),
    "Olmo2": FastFamily(AFTER, OLMO, plain_mlp=True),
    "Olmo3": FastFamily(AFTER, OLMO, plain_mlp=True),
    "Granite": FastFamily(BEFORE, LLAMA, plain_mlp=True, plain_attention=True),
    "SmolLM3": FastFamily(BEFORE, LLAMA, plain_mlp=True),
    "Gemma2": FastFamily(BOTH, GEMMA, plain_mlp=True),
    "Gemma3": FastFamily(BOTH, GEMMA, plain_mlp=True, plain_attention=True),
    "Phi3": FastFamily(BEFORE, LLAMA),
    "Qwen3Moe": FastFamily(BEFORE, LLAMA, plain_mlp=True, plain_attention=True),
    "Olmoe": FastFamily(BEFORE, LLAMA),
    "Mixtral": FastFamily(BEFORE, LLAMA, plain_attention=True),
    "GraniteMoe": FastFamily(BEFORE, LLAMA),
    "GptOss": FastFamily(BEFORE, OLMO),
    "Qwen3_5": FastFamily(BEFORE, GEMMA, plain_mlp=True),
}


def family_of(kind: type, part: str) -> FastFamily | None:
    """The family of a class in transformers whose name ends in `part`; None for any other."""
    name = kind.__name__
    known = kind.__module__.startswith("transformers.models.") and name.endswith(part)
    return FAMILIES.get(name.removesuffix(part)) if known else None
