"""The reasons for decoding without a recorded step, and what a recording depends on beside shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from deltanet_hf.decoding.recorders import RECORDERS
from deltanet_hf.mixers.layer_kind import LayerKind

FEWEST_TOKENS = 4  # fewer are generated sooner than a step is recorded
INPUTS = ("input_ids", "past_key_values", "position_ids", "attention_mask")
FLAGS = ("use_cache", "logits_to_keep", "return_dict")  # of a step, which changes nothing with them
PLAIN = (bool, int, float, str, type(None))  # types of attributes that count by value
OUR_HOOKS = (  # which do nothing in such a step
    "deltanet_hf.mixers.masks",
    "deltanet_hf.mixers.stateful",
    "transformers.utils.output_capturing",
)


def obstacle(model: Any, tokens: int, options: dict[str, Any]) -> str | None:
    """Why `generate` is not to record the step of this model, before anything is computed; None if it may.

    Args:
        tokens: of the prompt.
        options: keyword arguments of `GenerationMixin._sample`.
    """
    generation: Any = options["generation_config"]
    cache: Cache | None = options.get("past_key_values")
    if generation.disable_compile:
        return "disable_compile is set"
    if model.device.type not in RECORDERS:
        return f"the model is on {model.device.type}"
    if generation.cache_implementation not in (None, "dynamic") or type(cache) not in (type(None), DynamicCache):
        return "the cache is static, quantised or offloaded"
    if not options.get("use_cache", True) or generation.is_assistant or options.get("synced_gpus"):
        return "the cache is not this call's own"
    if generation.max_length is not None and generation.max_length - tokens < FEWEST_TOKENS:
        return f"fewer than {FEWEST_TOKENS} tokens are generated"
    if generation.output_attentions or generation.output_hidden_states:
        return "attentions or hidden states are returned"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    return next(_in_model(model), None)


def _in_model(model: Any) -> Iterator[str]:
    config = model.config
    if getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
        yield "attentions or hidden states are returned"
    if getattr(model, "hf_quantizer", None) is not None:
        yield "the weights are quantised"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        yield "the weights are on several devices"
    if config._attn_implementation not in ("sdpa", "eager") and any(
        not isinstance(getattr(layer, "self_attn", None), LayerKind) for layer in model.model.layers
    ):
        yield f"attn_implementation {config._attn_implementation!r} reads no mask"
    hooks = nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        yield "there are global forward hooks"
    for name, module in model.named_modules():
        yield from (f"{name or 'the model'}: {reason}" for reason in _in_module(module))


def is_replaced(module: nn.Module) -> bool:
    """Whether a call does not go to the forward of the module's class, or goes there by way of a compiler."""
    held = module.__dict__
    return "forward" in held or held.get("_compiled_call_impl") is not None


def _in_module(module: nn.Module) -> Iterator[str]:
    if module.training:
        yield "it is in training mode"
    if is_replaced(module):
        yield "its forward is compiled or replaced"
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(getattr(hook, "__module__", None) not in OUR_HOOKS for hook in hooks):
        yield "it has forward hooks"
    from_peft = type(module).__module__.startswith("peft.") and hasattr(module, "active_adapters")
    if from_peft and not getattr(module, "merged", False):
        yield "its adapter is not merged"
    rope = getattr(module, "rope_type", "")
    if "dynamic" in (rope.values() if isinstance(rope, dict) else (rope,)):
        yield "its rotary embedding depends on the length"


def inputs_obstacle(inputs: dict[str, Any], seen: int) -> str | None:
    """Why the first step of decoding, with `seen` tokens in the cache, cannot be recorded."""
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


def wiring(model: nn.Module) -> int:
    """A number that changes with what a recording depends on: addresses of weights, modules and their attributes."""
    found: list[Any] = [(tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers())]
    for module in model.modules():
        if module is not model:  # `generate` keeps things of its own there
            plain = ((name, value if type(value) in PLAIN else id(value)) for name, value in vars(module).items())
            found.append((id(type(module)), *plain))
    return hash(tuple(found))
