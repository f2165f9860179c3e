"""Keys and values of softmax attention in 8 or 4 bits, for the layers and heads of a converted model that keep them.

As in KIVI (arXiv 2402.02750): keys are quantised per channel over blocks of tokens, because a few channels of all keys
are large; values per token. The most recent tokens stay exact. Whatever is quantised once is never quantised again, so
errors do not add up. transformers' own quantised caches need optimum-quanto or hqq (or, from 5.20 on, store fp8 with
one scale per layer), and requantise the whole cache every 128 tokens; a converted model takes them as well.

Shapes: B batch, H key/value heads, T tokens, D head size, G numbers that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from deltanet_hf.errors import UserError

BLOCK = 64  # tokens of a key channel that share a scale, and the fewest recent tokens that stay exact
GROUP = 64  # channels of a value that share a scale, where the head size is a multiple of it
BITS = (8, 4)

Quantised = tuple[Tensor, Tensor, Tensor]
"""Codes [..., G] uint8 (for 4 bits [..., G / 2]), scale [..., 1] and lowest value [..., 1]."""


def quantise(x: Tensor, bits: int) -> Quantised:
    """The numbers x [..., G] on a grid of 2^bits even steps from the lowest to the highest of each group."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    steps = 2**bits - 1
    scale = ((high - low) / steps).clamp_min(torch.finfo(x.dtype).tiny)
    codes = ((x.float() - low.float()) / scale.float()).round().clamp(0, steps).to(torch.uint8)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return codes, scale, low


def dequantise(quantised: Quantised, bits: int) -> Tensor:
    """The inverse of `quantise`, in the dtype of the scales."""
    codes, scale, low = quantised
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return (codes * scale.float() + low.float()).to(scale.dtype)


class QuantizedKVLayer(DynamicLayer):
    """Takes the place of a growing key/value layer in a cache.

    `keys` and `values` [B, H, fewer than 2 * BLOCK, D] are the recent tokens; the others are in `_quantized_keys`, with
    groups [B, H, T / BLOCK, D, BLOCK], and `_quantized_values`, with groups [B, H, T, D / G, G].
    """

    is_croppable = False

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self._quantized_keys: Quantised | None = None
        self._quantized_values: Quantised | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes keys and values [B, H, T, D]; returns all there are, those of this call exact."""
        recent = super().update(key_states, value_states, *args, **kwargs)
        before = self._dequantised()
        ready = (recent[0].shape[2] // BLOCK - 1) * BLOCK
        if ready > 0:
            self._store(*(states[:, :, :ready] for states in recent))
            self.keys, self.values = (states[:, :, ready:].clone() for states in recent)
        if before is None:
            return recent
        keys, values = (torch.cat(pair, dim=2) for pair in zip(before, recent, strict=True))
        return keys, values

    def _store(self, keys: Tensor, values: Tensor) -> None:
        size = values.shape[-1]
        groups = values.unflatten(-1, (-1, GROUP if size % GROUP == 0 else size))
        new_keys = quantise(keys.unflatten(2, (-1, BLOCK)).mT, self.bits)
        new_values = quantise(groups, self.bits)
        self._quantized_keys = _appended(self._quantized_keys, new_keys)
        self._quantized_values = _appended(self._quantized_values, new_values)

    def one_block(self) -> QuantizedKVLayer:
        """A layer with the recent tokens of this one behind one quantised block of zeros."""
        assert self.keys is not None
        assert self.values is not None
        layer, zeros = QuantizedKVLayer(self.bits), []
        layer.lazy_initialization(self.keys, self.values)
        layer.keys, layer.values = self.keys, self.values
        for states in (self.keys, self.values):
            zeros.append(states.new_zeros(*states.shape[:2], BLOCK, states.shape[3]))
        layer._store(*zeros)
        return layer

    def _dequantised(self) -> tuple[Tensor, Tensor] | None:
        if self._quantized_keys is None or self._quantized_values is None:
            return None
        keys = dequantise(self._quantized_keys, self.bits).mT.flatten(2, 3)
        return keys, dequantise(self._quantized_values, self.bits).flatten(-2)

    def get_seq_length(self) -> int:
        stored = 0 if self._quantized_values is None else self._quantized_values[0].shape[2]
        return int(stored + super().get_seq_length())

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.keys is None or self.values is None:
            return
        self.keys, self.values = function(self.keys), function(self.values)
        if self._quantized_keys is not None and self._quantized_values is not None:
            self._quantized_keys = tuple(map(function, self._quantized_keys))  # type: ignore[assignment]
            self._quantized_values = tuple(map(function, self._quantized_values))  # type: ignore[assignment]

    def reset(self) -> None:
        self.keys = self.values = self._quantized_keys = self._quantized_values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError(
                f"crop: cannot take back {abs(tokens_to_remove)} tokens of a quantised cache; use one that is not"
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])

    def offload(self) -> None:
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map(lambda tensor: tensor.to(self.device, non_blocking=True))


def _appended(old: Quantised | None, new: Quantised) -> Quantised:
    if old is None:
        return new
    codes, scale, low = (torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
    return codes, scale, low


def quantized_cache(config: PreTrainedConfig, bits: int) -> DynamicCache:
    """An empty cache for `generate(..., past_key_values=cache)` that keeps growing keys and values in `bits` bits.

    Recurrent states and windows, a family's sliding ones too, stay as they are: their size does not grow.

    Args:
        config: of a converted or of a softmax model.
        bits: 8 or 4.

    Raises:
        UserError: another number of bits.
    """
    if bits not in BITS:
        raise UserError(f"cache bits: got {bits!r}, expected {' or '.join(map(str, BITS))}")
    cache = DynamicCache(config=config)
    cache.layers = [QuantizedKVLayer(bits) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
