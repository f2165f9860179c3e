"""The tensors of a packed cache, and how numbers are quantised and restored.

Shapes: B batch, HK key heads, N groups, D head size, G numbers that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltanet_kernels.common.registration import cached

GROUP = 32  # tokens of a key channel, and channels of a value, that share a scale
SINKS = 4  # tokens at the start of a sequence that are not packed
BLOCK = 16  # channels of a token that share a scale
PACKED_BITS = (8, 4)
LEAST_HALF_STEP = -10  # its power of two: keys of some models reach several hundred, few values stay below 0.03
LEAST_EXPONENT = -120  # of a block; kept as 0, so that zero bytes are the number 0


class PackedKeyValues(NamedTuple):
    """The keys and values of sequences, and their lengths.

    A token enters the cache in 8 bits, as (code - zero) * 2^exponent with a zero and an exponent for 16 channels: those
    with which codes from 0 to 255 reach from the lowest to the highest of these numbers and 0. bfloat16 has such
    numbers exactly, and rounding them again changes nothing.

    A packed number is low + code * scale. A word of 16 bits holds both for 32 numbers: h in the upper nine bits, four
    of exponent and five of mantissa, and z from -64 to 63 in the lower seven. Codes of 4 bits stand for z h - 15 h,
    z h - 13 h, ... z h + 15 h, those of 8 bits lie as evenly around z h, 16 to a step of these; those of 3 bits stand
    for z h - 7 h, z h - 5 h, ... z h + 7 h, and those of 5 bits for z h - 15 h, z h - 14 h, ... z h + 16 h.

    With n tokens before it, the last token of a sequence is in the group n // 32. The tokens of that group are in
    `keys` and `values` from place 4 on; the groups before it are packed, group g in the place g % N of N. The first
    four tokens are in the places 0 to 3 of `keys` and `values`, and their packed form is not read.

    Codes of keys lie token by token, codes of values channel by channel. A 32-bit word holds eight consecutive numbers
    of 4 bits, or four of 8: those of even places in its low half, those of odd places in its high half, in order from
    the lowest bits. So one shift brings a pair of neighbours to the lowest bits of both halves. A row whose length is
    no multiple of that is divided into the longest even runs that fit, in the same order.

    With a key order, which only 4 bits have, the channels of a key are packed in its order, and the places in the first
    half of a row have 5, 5, 3, 3, 5, 5, 3, 3, ... bits: the two codes of a byte have 5 and 3. A channel whose error
    weighs more in the scores can so have half of it for the bits of one whose error weighs less.
    """

    key_codes: Tensor  # [B, HK, N, 32, D * bits / 8] uint8
    key_scales: Tensor  # [B, HK, N, D] int16: words of each channel
    value_codes: Tensor  # [B, HK, N, D, 32 * bits / 8] uint8
    value_scales: Tensor  # [B, HK, N, D / 32, 32] int16: of 32 channels and each token (D <= 32: of each token)
    keys: Tensor  # [B, HK, 4 + 32, D] uint8
    values: Tensor  # [B, HK, 4 + 32, D] uint8
    token_scales: Tensor  # [B, HK, 4 + 32, 4 D / 16] uint8: 120 + exponents and zeros of keys, then of values
    lengths: Tensor  # [B] int32: tokens of the sequences
    key_order: Tensor | None = None  # [HK, 2, D] int64: the channel in each place, and the place of each channel

    @property
    def bits(self) -> int:
        return 8 * self.key_codes.shape[-1] // self.keys.shape[-1]

    @property
    def groups(self) -> int:
        """N."""
        return self.key_codes.shape[2]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that change with the tokens: all but the key order."""
        return self[:8]

    def with_tensors(self, tensors: Iterable[Tensor]) -> PackedKeyValues:
        """Other tokens with the same key order."""
        return PackedKeyValues(*tensors, self.key_order)  # type: ignore[call-arg]

    @staticmethod
    def joined(caches: Sequence[PackedKeyValues]) -> PackedKeyValues:
        """The sequences of caches with the same key order and number of groups, in one."""
        return caches[0].with_tensors(map(torch.cat, zip(*(cache.tensors for cache in caches), strict=True)))

    def group(self, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [B, HK, 32, D] of the packed group of each sequence in the place [B]."""
        row = torch.arange(len(place), device=place.device)
        return unpacked([x[row, :, place].unsqueeze(2) for x in self[:4]], dtype, self.key_order)


def is_packable(D: int) -> bool:
    """Whether heads of D channels have a packed form: whole groups of channels, or an even part of one."""
    return D % GROUP == 0 or (D < GROUP and D % 2 == 0)


def takes_key_order(D: int) -> bool:
    """Whether their keys can have 5, 4 and 3 bits."""
    return is_packable(D) and D % 8 == 0


def token_blocks(D: int) -> int:
    """Parts of a token's D channels that have a scale each: of 16 channels if D is a multiple of 16."""
    return D // math.gcd(BLOCK, D)


def _power(exponents: Tensor) -> Tensor:
    """2 to these powers, whole numbers from -126 to 127, in float32."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _token_codes(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., D] in 8 bits as in `PackedKeyValues`, P = D / 16: codes [..., P, 16] and zeros [..., P] in float32, and
    exponents [..., P]. No gradients."""
    blocks = x.detach().float().unflatten(-1, (token_blocks(x.shape[-1]), -1))
    low, high = blocks.amin(-1).clamp_max_(0), blocks.amax(-1).clamp_min_(0)
    ranges = (high - low).clamp_min_(2.0 ** (LEAST_EXPONENT + 7))
    exponents = torch.frexp(ranges).exponent - 8  # a significand is between 1/2 and 1
    steps = _power(-exponents)
    zeros = low.mul_(steps).neg_().round_().clamp_max_(255)
    codes = (blocks * steps.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 255)
    return codes, zeros, exponents


def rounded_tokens(x: Tensor) -> Tensor:
    """The keys or values x [..., D] as a cache takes them in. No gradients."""
    codes, zeros, exponents = _token_codes(x)
    return codes.sub_(zeros.unsqueeze(-1)).mul_(_power(exponents).unsqueeze(-1)).flatten(-2).to(x.dtype)


def token_tensors(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`keys`, `values` and `token_scales` of a cache, of k and v [B, HK, T, D]."""
    (keys, *key_scales), (values, *value_scales) = _token_codes(k), _token_codes(v)
    scales = [x for zeros, exponents in (key_scales, value_scales) for x in (exponents - LEAST_EXPONENT, zeros)]
    return keys.flatten(3).to(torch.uint8), values.flatten(3).to(torch.uint8), torch.cat(scales, dim=3).to(torch.uint8)


def tokens_of(cache: PackedKeyValues, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of `token_tensors`: [B, HK, 36, D]."""
    exponents, zeros = cache.token_scales.unflatten(3, (2, 2, -1, 1)).unbind(4)  # each [B, HK, 36, 2, P, 1]
    steps, zeros = _power(exponents.int() + LEAST_EXPONENT), zeros.float()
    keys, values = (
        (codes.unflatten(3, (zeros.shape[4], -1)) - zeros[:, :, :, n]).mul_(steps[:, :, :, n]).flatten(3).to(dtype)
        for n, codes in enumerate((cache.keys, cache.values))
    )
    return keys, values


Bits = int | Tensor  # of numbers: all alike, or an int32 tensor that broadcasts against them


def _code_range(bits: Bits) -> tuple[Any, Any, Any]:
    """Of codes of so many bits: the last one, and in units of h, a step and how far the first is below z h."""
    last = 2**bits - 1
    if isinstance(bits, Tensor):  # of 3 to 5 bits
        return last, _power(1 - (bits - 4).clamp_min(0)), last.clamp_max(15)  # type: ignore[union-attr]
    return last, 2.0 ** (1 - max(0, bits - 4)), 255 / 16 if bits == 8 else min(15, last)


def quantised(x: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """x [..., G] on 2^bits even steps: whole numbers [..., G] float32, and their words [..., 1] int16.

    Of all zeros and half steps h, those are taken with which the steps reach from the lowest to the highest number.
    """
    wide, (last, step, below) = x.float(), _code_range(bits)
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    ends = low + high
    least = torch.maximum((high - low) * (0.5 / (below // 1)), ends.abs() * (0.5 / 63))
    significand, exponent = torch.frexp(least.clamp_(2.0**LEAST_HALF_STEP, 2.0 ** (LEAST_HALF_STEP + 16)))
    steps = (significand * 64 + 0.5).int() + (exponent - LEAST_HALF_STEP - 2) * 32
    steps.clamp_max_(511)
    zeros = (ends * 0.5 / _half_steps(steps) - (last * step / 2 - below)).round_().clamp_(-64, 63)
    words = ((steps << 7) + zeros.int() + 64).to(torch.int16)
    scale, low = scales_of(words, bits)
    return ((wide - low) / scale).round_().clamp_min_(0).clamp_max_(last), words


def _half_steps(steps: Tensor) -> Tensor:
    """h in float32 of the upper nine bits of words."""
    return ((steps << 18) + ((127 + LEAST_HALF_STEP) << 23)).view(torch.float32)


def scales_of(words: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """The scales and the lowest numbers, float32 that bfloat16 has exactly, of words int16 of this shape."""
    wide, (_, step, below) = words.int(), _code_range(bits)
    h = _half_steps((wide >> 7) & 511)
    return h * step, (h * ((wide & 127) - 64 - below)).bfloat16().to(h.dtype)


def restored(codes: Tensor, words: Tensor, bits: Bits, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantised`, computed in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    scale, low = scales_of(words, bits)
    return (low.to(wide) + codes.to(wide) * scale.to(wide)).to(dtype)


@cached
def key_bits(D: int, device: torch.device) -> Tensor:
    """[D] int32: the bits of keys with a key order, by their places."""
    place = torch.arange(D, device=device, dtype=torch.int32)
    return 4 + (1 - place // 2 % 2 * 2) * (place < D // 2)


def by_places(k: Tensor, key_order: Tensor | None) -> Tensor:
    """Keys, or queries of each key head, [B, HK, ..., D] with their channels in the places of a key order."""
    return k if key_order is None else _by_heads(k, key_order[:, 0])


def _by_heads(x: Tensor, index: Tensor) -> Tensor:
    """x [B, HK, ..., D] taken at index [HK, D]."""
    heads, size = index.shape
    return x.gather(-1, index.view(1, heads, *[1] * (x.dim() - 3), size).expand_as(x))


@cached
def _stored_order(numbers: int, bits: int, device: torch.device) -> Tensor:
    """[C] int: the numbers of a row, counted from 0, in the order in which their codes are stored."""
    run = math.gcd(numbers, 32 // bits)
    order = [start + half + even for start in range(0, numbers, run) for half in (0, 1) for even in range(0, run, 2)]
    return torch.tensor(order, device=device)


def in_stored_order(x: Tensor, bits: int) -> Tensor:
    """The numbers of the rows of x [..., C] in the order of `stored_codes`."""
    return x.gather(-1, _stored_order(x.shape[-1], bits, x.device).expand_as(x))


@cached
def _byte_parts(numbers: int, bits: int, ordered: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the bytes of a row that hold two codes: the bits of the first [C / 2] uint8, and the ones [C / 2] int16 of
    both, moved to bytes of their own."""
    stored = (
        in_stored_order(key_bits(numbers, device), bits) if ordered else torch.full((numbers,), bits, device=device)
    )
    first, second = stored.unflatten(-1, (-1, 2)).unbind(-1)
    return first.to(torch.uint8), (2**first - 1 + (2**second - 1) * 256).to(torch.int16)


def stored_codes(packed: Tensor, bits: int, ordered: bool = False) -> Tensor:
    """The codes [..., C] uint8 of packed rows, in the order in which they are stored; `ordered` by a key order."""
    if bits == 8:
        return packed
    first, ones = _byte_parts(2 * packed.shape[-1], bits, ordered, packed.device)
    pairs = packed.to(torch.int16)
    moved = pairs << (8 - first)
    if ordered:  # a first code of 5 bits would reach into its own place
        moved.bitwise_and_(-256)
    return moved.bitwise_or_(pairs).bitwise_and_(ones).view(torch.uint8)


def _bytes(codes: Tensor, bits: int, ordered: bool = False) -> Tensor:
    """The whole numbers [..., C] of `quantised` in bytes, in the order of `PackedKeyValues`."""
    codes = in_stored_order(codes.to(torch.uint8), bits)
    if bits == 8:
        return codes
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << _byte_parts(codes.shape[-1], bits, ordered, codes.device)[0]


def _codes(packed: Tensor, bits: int, ordered: bool = False) -> Tensor:
    codes = stored_codes(packed, bits, ordered)
    some = math.gcd(codes.shape[-1], 32 // bits)
    return codes.unflatten(-1, (-1, 2, some // 2)).mT.flatten(-3)


def packed_groups(
    k: Tensor, v: Tensor, bits: int, key_order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first four tensors of a cache, of k and v [B, HK, N * 32, D]."""
    k, v = (x.unflatten(2, (-1, GROUP)) for x in (by_places(k, key_order), v))
    ordered = key_order is not None
    key_codes, key_words = quantised(k.mT, key_bits(k.shape[-1], k.device).unsqueeze(-1) if ordered else bits)
    value_codes, value_words = quantised(v.unflatten(-1, (-1, min(GROUP, v.shape[-1]))), bits)
    return (
        _bytes(key_codes.mT, bits, ordered).contiguous(),
        key_words.squeeze(-1),
        _bytes(value_codes.flatten(-2).mT, bits).contiguous(),
        value_words.squeeze(-1).mT.contiguous(),
    )


def unpacked(groups: Sequence[Tensor], dtype: torch.dtype, key_order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values [B, HK, N * 32, D] of `packed_groups`."""
    key_codes, key_words, value_codes, value_words = groups
    bits, ordered = 8 * key_codes.shape[-1] // key_words.shape[-1], key_order is not None
    widths = key_bits(key_words.shape[-1], key_words.device) if ordered else bits
    keys = restored(_codes(key_codes, bits, ordered), key_words.unsqueeze(3), widths, dtype).flatten(2, 3)
    codes = _codes(value_codes, bits).mT.unflatten(-1, (value_words.shape[3], -1))
    values = restored(codes, value_words.mT.unsqueeze(-1), bits, dtype)
    return keys if key_order is None else _by_heads(keys, key_order[:, 1]), values.flatten(-2).flatten(2, 3)


def token_numbers(lengths: Tensor, groups: int) -> Tensor:
    """[B, N * 32 + 36] int: the tokens, counted from 0, in the places of N groups and behind them of `keys`.

    -1 where a place holds no token, or one of the first four that is also in another place.
    """
    last, device = lengths.long()[:, None] - 1, lengths.device
    current = last.div(GROUP, rounding_mode="floor")
    within = torch.arange(GROUP, device=device)
    held = current - 1 - (current - 1 - torch.arange(groups, device=device)) % max(groups, 1)
    packed = (held.unsqueeze(-1) * GROUP + within).flatten(1)
    first = torch.arange(SINKS, device=device).where(current > 0, -1)
    own = current * GROUP + within
    return torch.cat([packed.where(packed >= SINKS, -1), first, own.where(own <= last, -1)], dim=1)
