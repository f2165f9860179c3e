"""Refuses calls whose cache or mask does not fit the inputs: a recurrent state cannot show later that it was misused.

Keys and values can be cut, counted and compared with the tokens; a state only holds their sum. What transformers
computes from a misfit is wrong tokens, so these calls end with a ValueError that says what to pass instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.paired_class import paired_class
from deltanet_hf.mixers.cache.argument import CACHE, cache_in
from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.layer.masks import announce_packing, announce_padding, inputs_in


class Stateful:
    """Stands before the class of a causal language model whose layers keep states or windows."""

    is_restricted = False
    """Whether it has windows that its configuration does not know (`restrict.py`)."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            UserError: windows that would not come back.
        """
        if self.is_restricted:
            raise UserError(
                "save_pretrained: config.json does not have the windows that this model was put under, which would not "
                "come back; make a model with windows by `deltanet-hf convert --mixer window`"
            )
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Behind `generate_batch` and `cache_implementation="paged"`.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "generate_batch: continuous batching keeps keys and values in pages, which have no place for the states "
            "of converted layers; call generate with a batch that is padded on the left"
        )

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Greedy decoding and sampling; a cache that the caller gets back remembers the tokens that it holds."""
        result = super()._sample(input_ids, *args, **kwargs)  # type: ignore[misc]
        sequences = getattr(result, "sequences", result)
        cache = getattr(result, CACHE, kwargs.get(CACHE))
        if cache is not None and int(cache.get_seq_length()) == sequences.shape[1] - 1:
            for layer in cache.layers:
                as_cache_layer(layer).written = sequences[:, :-1]
        return result

    def _prefill(
        self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The first forward of `generate`, which cuts off what the cache holds already."""
        cache: Any = model_kwargs.get(CACHE)
        if cache is not None and model_kwargs.get("use_cache") is False:
            raise ValueError(
                "use_cache: false, but a cache is given, into which every step would write all tokens again; "
                "leave out one of the two"
            )
        seen = 0 if cache is None else int(cache.get_seq_length())
        if cache is not None:  # a captured prompt does not call the decoder
            _check_bits(cache, seen, getattr(self.model, "cache_bits", 16))  # type: ignore[attr-defined]
        if seen:
            mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
            given = input_ids.shape[1] if embeds is None else embeds.shape[1]
            # transformers drops a mask of ones, and keeps its length here
            masked = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
            _check_continuation(seen, given, masked)
            if masked == given and embeds is None:
                _check_tokens(cache, input_ids[:, :seen])
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]


def _check_continuation(seen: int, given: int, masked: int) -> None:
    """Raises ValueError unless `given` tokens under a mask of `masked` continue a cache of `seen` tokens."""
    if masked == given and given <= seen:
        raise ValueError(
            f"cache: holds {seen} tokens and the prompt has {given}; a state cannot go back: pass the "
            "sequence that the cache was returned with and more tokens, or a copy of the cache made earlier, or none"
        )
    if masked not in (given, seen + given):
        raise ValueError(
            f"attention_mask: has {masked} columns, but the cache holds {seen} tokens and {given} are new; give "
            f"one column for each of the {seen + given}"
        )


def _check_tokens(cache: Any, input_ids: Tensor) -> None:
    """Raises ValueError if the cache is known to hold other tokens than those before the new ones, `input_ids`."""
    known = (as_cache_layer(layer).written for layer in cache.layers)
    written = next((ids for ids in known if ids is not None), None)
    if written is None or len(written) != len(input_ids):
        return
    written = written[:, : input_ids.shape[1]]
    if not torch.equal(input_ids[:, : written.shape[1]].to(written.device), written):
        raise ValueError(
            f"cache: the first {written.shape[1]} tokens of the prompt are not those that this cache was "
            "returned with; pass that sequence and more tokens, or no cache"
        )


def check_held(cache: Any, input_ids: Tensor, bits: int) -> None:
    """Raises ValueError if a cache is known to hold something else than tokens [B, T] read by a model of these bits."""
    seen = _tokens_in(cache, len(input_ids))
    _check_bits(cache, seen, bits)
    _check_tokens(cache, input_ids)


def make_stateful(model: Any) -> None:
    """Puts `Stateful` before the class of a model, under the same name; its decoder checks and announces its calls."""
    announce(model.model)
    if not isinstance(model, Stateful):
        own: Any = type(model)
        model.__class__ = paired_class(Stateful, own, own.__name__)
    model._is_stateful = True


def announce(decoder: nn.Module) -> None:
    """Make packed rows and padding known to the layers of a decoder, and check its calls, once."""
    present = decoder._forward_pre_hooks.values()
    for hook in (check_call, announce_packing, announce_padding):
        if hook not in present:
            decoder.register_forward_pre_hook(hook, with_kwargs=True)


def check_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the decoder, which reads shapes and counts only; compiled calls are not checked.

    Raises:
        ValueError: a cache that is none, that was filled with another number of rows or in other bits, or whose layers
            hold different numbers of tokens; a mask for other rows, or with too few columns.
    """
    inputs = inputs_in(args, kwargs)
    if inputs is None or torch.compiler.is_compiling():
        return
    rows, length = inputs.shape[:2]
    cache, mask = cache_in(kwargs), kwargs.get("attention_mask")
    seen = 0 if cache is None else _tokens_in(cache, rows)
    if cache is not None:
        _check_bits(cache, seen, getattr(module, "cache_bits", 16))
    if not isinstance(mask, Tensor) or mask.dim() == 4:
        return
    if mask.dim() != 2 or mask.shape[0] != rows or (seen is not None and mask.shape[1] < seen + length):
        wanted = f"[{rows}, {'T' if seen is None else seen + length}]"
        raise ValueError(
            f"attention_mask: got shape {list(mask.shape)}, expected {wanted}: one column for each token, those in "
            "the cache included"
        )


def _tokens_in(cache: Any, rows: int) -> int | None:
    """The number of tokens that every layer of a cache holds; None if it is on the device (static caches)."""
    if not isinstance(cache, Cache):
        raise ValueError(f"cache: got {type(cache).__name__}, expected a Cache of transformers, such as DynamicCache()")
    for layer in cache.layers:
        held = as_cache_layer(layer).batch_size
        if held not in (-1, rows):
            raise ValueError(
                f"cache: holds {held} sequences and the inputs have {rows}; repeat it with "
                "batch_repeat_interleave, or pass a cache of these sequences"
            )
    lengths = {tokens for layer in cache.layers if (tokens := as_cache_layer(layer).tokens) is not None}
    if any(isinstance(length, Tensor) for length in lengths):
        return None
    if len(lengths) > 1:
        raise ValueError(
            f"cache: its layers hold {min(lengths)} to {max(lengths)} tokens, so it was not filled by this "
            "model alone; pass an empty cache"
        )
    return int(lengths.pop()) if lengths else 0


def _check_bits(cache: Any, seen: int | None, bits: int) -> None:
    """Raises ValueError if a cache of `seen` tokens was filled in other bits than the model has; remembers these."""
    filled = getattr(cache, "_deltanet_bits", bits)
    if seen != 0 and filled != bits:
        raise ValueError(
            f"cache: was filled with keys and values in {filled} bits, and the model has {bits} now; "
            f"set_cache_bits(model, {filled}), or pass an empty cache"
        )
    cache._deltanet_bits = bits
