"""The numbers of a packed cache in Triton: tokens in 8 bits, and groups of 32 packed and restored (`layout.py`)."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.packed_cache import layout

GROUP = tl.constexpr(layout.GROUP)
SINKS = tl.constexpr(layout.SINKS)
TOKENS = tl.constexpr(layout.SINKS + layout.GROUP)  # of a head that are not packed
LEAST_HALF_STEP = tl.constexpr(layout.LEAST_HALF_STEP)
BLOCK = tl.constexpr(layout.BLOCK)
LEAST_EXPONENT = tl.constexpr(layout.LEAST_EXPONENT)


@triton.jit
def _half_step(word):
    """h in float32 of words as in `layout.PackedKeyValues`, of which only the lowest 16 bits are read."""
    h = (((word.to(tl.int32) >> 7) & 511) << 18) + ((127 + LEAST_HALF_STEP) << 23)
    return h.to(tl.float32, bitcast=True)


@triton.jit
def in_order(order, n, D: tl.constexpr):
    """Numbers n of a row of a key order, below D whatever a file says."""
    return tl.load(order + n).to(tl.int32) & (D - 1)


@triton.jit
def bits_of(place, C: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr):
    """The bits of the numbers in these places of a row of C; keys may be ORDERED, as `layout.key_bits`."""
    bits = place * 0 + BITS
    if ORDERED:
        bits += tl.where(place < C // 2, 1 - place // 2 % 2 * 2, 0)
    return bits


@triton.jit
def scale_and_low(word, bits):
    """The scale and the lowest number float32 of words as in `layout.PackedKeyValues`."""
    h = _half_step(word)
    z = ((word.to(tl.int32) & 127) - 64).to(tl.float32)
    below = tl.where(bits == 8, 255 / 16, tl.minimum((1 << bits) - 1, 15).to(tl.float32))
    return h * _power(1 - tl.maximum(bits - 4, 0)), (h * (z - below)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def shifts(C: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr):
    """[C BITS / 32, 16 / BITS]: where codes begin in the halves of each word of a row of C numbers."""
    n, word = tl.arange(0, 16 // BITS)[None, :], tl.arange(0, C * BITS // 32)[:, None]
    shift = n * BITS + word * 0
    if ORDERED:  # a second code of 3 bits follows 5
        shift += tl.where(word < C * BITS // 64, n % 2, 0)
    return shift


@triton.jit
def _power(exponent):
    """2 to this power, a whole number from -126 to 127."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _token_codes(x, R: tl.constexpr, D: tl.constexpr):
    """x [R, D] float32 in 8 bits as in `layout.PackedKeyValues`: codes [R, P, 16] and zeros [R, P] in float32, and
    exponents [R, P], of P = D / 16 blocks."""
    x = tl.reshape(x, [R, D // BLOCK, BLOCK])
    low, high = tl.minimum(tl.min(x, axis=2), 0.0), tl.maximum(tl.max(x, axis=2), 0.0)
    logarithm = ((high - low).to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(logarithm - 7, LEAST_EXPONENT)
    steps = _power(-exponent)
    zero = tl.minimum(_nearest(-low * steps), 255.0)
    codes = _nearest(x * steps[:, :, None]) + zero[:, :, None]
    return tl.minimum(tl.maximum(codes, 0.0), 255.0), zero, exponent


@triton.jit
def _nearest(x):
    """The nearest whole number, ties to even, of numbers between -2^22 and 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def rounded_tokens(x, R: tl.constexpr, D: tl.constexpr):
    """x [R, D] float32 as `layout.rounded_tokens`."""
    codes, zero, exponent = _token_codes(x, R, D)
    return tl.reshape((codes - zero[:, :, None]) * _power(exponent)[:, :, None], [R, D])


@triton.jit
def store_tokens(x, codes, scales, place, mask, VALUES: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """Put x [R, D] float32, keys or else VALUES, into the places [R] of one head."""
    P: tl.constexpr = D // BLOCK
    m = mask[:, None]
    x, zero, exponent = _token_codes(x, R, D)
    tl.store(codes + place[:, None] * D + tl.arange(0, D)[None, :], tl.reshape(x, [R, D]).to(tl.uint8), mask=m)
    at = scales + place[:, None] * (4 * P) + VALUES * (2 * P) + tl.arange(0, P)[None, :]
    tl.store(at, (exponent - LEAST_EXPONENT).to(tl.uint8), mask=m)
    tl.store(at + P, zero.to(tl.uint8), mask=m)


@triton.jit
def load_tokens(codes, scales, place, mask, VALUES: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """Keys, or else VALUES, [R, D] float32 in the places [R] of one head; 0 without `mask`."""
    P: tl.constexpr = D // BLOCK
    m = mask[:, None]
    x = tl.load(codes + place[:, None] * D + tl.arange(0, D)[None, :], mask=m, other=0).to(tl.float32)
    at = scales + place[:, None] * (4 * P) + VALUES * (2 * P) + tl.arange(0, P)[None, :]
    exponent = tl.load(at, mask=m, other=0).to(tl.int32) + LEAST_EXPONENT
    zero = tl.load(at + P, mask=m, other=0).to(tl.float32)
    x = tl.reshape(x, [R, P, BLOCK]) - zero[:, :, None]
    return tl.reshape(x * _power(exponent)[:, :, None], [R, D])


@triton.jit
def _quantise(x, low, high, bits):
    """Codes of x and their words, as `layout.quantised`; `low`, `high` and `bits` have the shape of x or 1."""
    ends, last = low + high, (1 << bits) - 1
    least = tl.maximum((high - low) * tl.where(last < 15, 0.5 / 7, 0.5 / 15), tl.abs(ends) * (0.5 / 63))
    least = tl.minimum(tl.maximum(least, 2.0**LEAST_HALF_STEP), 2.0 ** (LEAST_HALF_STEP + 16))
    steps = ((least.to(tl.int32, bitcast=True) + (1 << 17)) >> 18) - (127 + LEAST_HALF_STEP) * 32
    word = tl.minimum(steps, 511) << 7
    zero = tl.div_rn(ends * 0.5, _half_step(word))
    zero = _nearest(tl.where(bits == 5, zero - 0.5, zero))
    word += tl.minimum(tl.maximum(zero, -64.0), 63.0).to(tl.int32) + 64
    scale, low = scale_and_low(word, bits)
    steps = tl.div_rn(x - low, tl.broadcast_to(scale, x.shape))
    codes = tl.minimum(tl.maximum(steps, 0.0), last.to(tl.float32))
    return _nearest(codes).to(tl.int32), word, scale, low


@triton.jit
def _pack(x, codes, scales, order, kept, R: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr):
    """Pack x [R, C] float32, each column of 32 rows together, if `kept`; returns the numbers that are restored.

    `order` is the key order of the head [2, C], or None.
    """
    N: tl.constexpr = 16 // BITS
    B: tl.constexpr = R // GROUP
    c = tl.arange(0, C)
    place = c
    if order is not None:
        place = in_order(order + C, c, C)
    bits = bits_of(place, C, BITS, order is not None)[None, None, :]
    x = tl.reshape(x, [B, GROUP, C])
    n, word, scale, low = _quantise(x, tl.min(x, axis=1)[:, None, :], tl.max(x, axis=1)[:, None, :], bits)
    if kept:
        at = scales + tl.arange(0, B)[:, None] * C + place[None, :]
        tl.store(at, tl.reshape(word, [B, C]).to(tl.int16))
        in_places = tl.reshape(n, [R, C])
        if order is not None:
            in_places = tl.gather(in_places, tl.broadcast_to(in_order(order, c, C)[None, :], [R, C]), 1)
        shift = shifts(C, BITS, order is not None)[:, :, None] + tl.arange(0, 2)[None, None, :] * 16
        words = tl.reshape(in_places, [R, C // (2 * N), N, 2]) << shift[None, :, :, :]
        words = tl.sum(tl.sum(words, axis=3), axis=2).to(tl.int32)
        W: tl.constexpr = C * BITS // 32
        words_at = codes.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(words_at + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :], words)
    # The product is exact, so that a fused addition rounds as `layout.restored`.
    return tl.reshape(low + n.to(tl.float32) * scale, [R, C])


@triton.jit
def pack_group(
    keys, values, k_token, v_token, key_codes, key_scales, value_codes, value_scales, order, group, kept,
    D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Pack the 32 tokens at `keys` and `values`, `k_token` and `v_token` elements apart, as number `group` of all.

    The codes are stored if `kept`. `order` is the key order of the head, or None. Returns the keys [32, D] and values
    [D, 32] float32 that are restored from them.
    """
    r, d = tl.arange(0, GROUP), tl.arange(0, D)
    k = tl.load(keys + r.to(tl.int64)[:, None] * k_token + d[None, :])
    v = tl.load(values + r.to(tl.int64)[None, :] * v_token + d[:, None])
    return pack_loaded(k, v, key_codes, key_scales, value_codes, value_scales, order, group, kept, D, BITS)


@triton.jit
def pack_loaded(
    k, v, key_codes, key_scales, value_codes, value_scales, order, group, kept, D: tl.constexpr, BITS: tl.constexpr
):
    """As `pack_group`, of keys [32, D] and values [D, 32]."""
    at = group * (GROUP * D * BITS // 8)
    new_k = _pack(k.to(tl.float32), key_codes + at, key_scales + group * D, order, kept, GROUP, D, BITS)
    new_v = _pack(v.to(tl.float32), value_codes + at, value_scales + group * D, None, kept, D, GROUP, BITS)
    return new_k, new_v


@triton.jit
def _unpacked(words, scales, place, C: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr):
    """The numbers float32 of words that hold them in place `place` of their rows of C, as `layout.restored`."""
    bits = bits_of(place, C, BITS, ORDERED)
    scale, low = scale_and_low(scales, bits)
    shift = place % (32 // BITS) // 2 * BITS + place % 2 * 16
    if ORDERED:
        shift += tl.where(place < C // 2, place // 2 % 2, 0)
    n = ((words >> shift) & ((1 << bits) - 1)).to(tl.float32)
    return low + n * scale


@triton.jit
def unpack_group(key_codes, key_scales, value_codes, value_scales, order, group, D: tl.constexpr, BITS: tl.constexpr):
    """The keys and values [32, D] float32 of number `group` of all packed groups."""
    PER_WORD: tl.constexpr = 32 // BITS
    r, d = tl.arange(0, GROUP)[:, None], tl.arange(0, D)[None, :]
    kc = key_codes.to(tl.pointer_type(tl.int32), bitcast=True) + group * (D * BITS)
    vc = value_codes.to(tl.pointer_type(tl.int32), bitcast=True) + group * (D * BITS)
    key_scales += group * D
    value_scales += group * D
    place = d
    if order is not None:
        place = in_order(order + D, d, D)
    words = tl.load(kc + r * (D // PER_WORD) + place // PER_WORD)
    k = _unpacked(words, tl.load(key_scales + place), place, D, BITS, order is not None)
    words = tl.load(vc + d * BITS + r // PER_WORD)
    part = d // GROUP * GROUP + r
    v = _unpacked(words, tl.load(value_scales + part), r, GROUP, BITS, False)
    return k, v


@triton.jit
def clear_group(codes, scales, place, D: tl.constexpr, BITS: tl.constexpr):
    """Stores zeros as the codes and scales of number `place` of all packed groups."""
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    w, s = tl.arange(0, D * BITS), tl.arange(0, D)
    tl.store(codes + place * (D * BITS) + w, w * 0)
    tl.store(scales + place * D + s, s * 0)


@triton.jit
def copy_group(codes, scales, group, new_codes, new_scales, place, D: tl.constexpr, BITS: tl.constexpr):
    """Copies the codes and scales of number `group` of all packed groups to number `place` of others."""
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    new_codes = new_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    w, s = tl.arange(0, D * BITS), tl.arange(0, D)
    tl.store(new_codes + place * (D * BITS) + w, tl.load(codes + group * (D * BITS) + w))
    tl.store(new_scales + place * D + s, tl.load(scales + group * D + s))
