"""Assisted generation and prompt lookup with converted models.

Both have transformers take back the candidate tokens that the model rejects (`Cache.crop`), for which states record
their past (`deltanet_hf/mixers/cache/history.py`). transformers asks a cache to record before the model's first call,
when the cache has the key/value layers of the softmax model only. So the states are put in their places before that.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.models.layers import layer_kinds
from deltanet_hf.models.unwrapped import unwrapped


def place_layers(model: Any, cache: Cache) -> None:
    """Give `cache` the layers that the first call of a converted model, or of a PEFT model around one, makes."""
    for _, kind in layer_kinds(unwrapped(model)):
        kind.place_cache(cache)


class AssistedGeneration:
    """In front of a family's model class: `generate` prepares the cache for taking tokens back where it will do so."""

    _is_stateful = False  # transformers refuses to assist classes that say otherwise, as Qwen3.5's does

    def _prepare_cache_for_generation(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *sizes: Any
    ) -> Any:
        result = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, *sizes
        )
        cache = model_kwargs.get(CACHE)
        if cache is None:
            return result
        if generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION:
            seen = int(cache.get_seq_length())
            if seen and not generation_config.is_assistant:  # transformers would read the whole prompt behind it
                raise ValueError(
                    f"cache: holds {seen} tokens, but assisted generation reads a prompt from its beginning; "
                    "pass no cache, or decode without assistance"
                )
            place_layers(self, cache)
            if not cache.is_croppable:
                raise ValueError(
                    "cache: assisted generation takes tokens back, which a quantised or static cache cannot; "
                    "leave the cache out, or decode without assistance"
                )
            cache.activate_past_recording()
        else:  # a cache that was handed in may record since an earlier assisted generation
            for layer in cache.layers:
                if getattr(layer, "record_past", False):
                    if layer.is_initialized:
                        layer.crop(0)  # sliding layers hold more than their window until then
                    layer.record_past = False
        return result
