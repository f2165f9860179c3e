"""The reasons for decoding without a captured step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.fast.form import reason_of_call
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.layer.layer_kind import kinds_among

FEWEST_TOKENS = 4  # fewer are generated sooner than a step is captured
INPUTS = ("input_ids", CACHE, "position_ids", "attention_mask")
FLAGS = ("use_cache", "logits_to_keep", "return_dict")  # of a step, which changes nothing with them


def obstacle(model: Any, tokens: int, options: dict[str, Any]) -> str | None:
    """Why `generate` is not to capture the step of this model, before anything is computed; None if it may.

    Args:
        tokens: of the prompt.
        options: keyword arguments of `GenerationMixin._sample`.
    """
    generation: Any = options["generation_config"]
    cache: Cache | None = options.get(CACHE)
    if generation.disable_compile:
        return "disable_compile is set"
    if model.device.type not in CAPTURES:
        return f"the model is on {model.device.type}"
    if generation.cache_implementation not in (None, "dynamic") or type(cache) not in (type(None), DynamicCache):
        return "the cache is static, quantised or offloaded"
    if not options.get("use_cache", True) or generation.is_assistant or options.get("synced_gpus"):
        return "the cache is not this call's own"
    if generation.max_length is not None and generation.max_length - tokens < FEWEST_TOKENS:
        return f"fewer than {FEWEST_TOKENS} tokens are generated"
    if generation.output_attentions or generation.output_hidden_states:
        return "attentions or hidden states are returned"
    return reason_of_call(model, {}) or next(in_model(model), None)


def in_model(model: Any) -> Iterator[str]:
    """The reasons that lie in the model and its configuration."""
    config = model.config
    layers = model.model.layers
    kinds = [kind for layer in layers for kind in kinds_among(layer.children())]
    if config._attn_implementation not in ("sdpa", "eager") and len(kinds) < len(layers):
        yield f"attn_implementation {config._attn_implementation!r} reads no mask"
    for name, module in model.named_modules():
        rope = getattr(module, "rope_type", "")
        if "dynamic" in (rope.values() if isinstance(rope, dict) else (rope,)):
            yield f"{name}: its rotary embedding depends on the length"


def inputs_obstacle(inputs: dict[str, Any], seen: int) -> str | None:
    """Why the first step of decoding, with `seen` tokens in the cache, cannot be captured."""
    used = (name for name, value in inputs.items() if value is not None and value is not False)
    further = [name for name in used if name not in INPUTS + FLAGS]
    if further:
        return f"the model is given {', '.join(further)}"
    if inputs.get("input_ids") is None or inputs.get("position_ids") is None:
        return "the model is given no input_ids or position_ids"
    mask = inputs.get("attention_mask")
    if mask is not None and tuple(mask.shape) != (inputs["input_ids"].shape[0], seen + 1):
        return "the attention mask does not fit the cache"
    return None
