"""The kernels on a packed cache: attention over a span of its groups, and appending a token.

A thread of the tensor cores' products holds pairs of neighbouring numbers. The codes lie in the order in which threads
hold them (`layout.py`), so that the words that a thread loads are the numbers that it multiplies, and none goes through
shared memory: columns are channels, and tokens within a group, in the order of `_by_threads`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.packed_cache import layout
from deltanet_kernels.window.softcap import cap_score
from deltanet_kernels.window.step import take_ticket, turned

GROUP = tl.constexpr(layout.GROUP)
SINKS = tl.constexpr(layout.SINKS)
TOKENS = tl.constexpr(layout.SINKS + layout.GROUP)  # of a head that are not packed
LEAST_HALF_STEP = tl.constexpr(layout.LEAST_HALF_STEP)
BLOCK = tl.constexpr(layout.BLOCK)
LEAST_EXPONENT = tl.constexpr(layout.LEAST_EXPONENT)


@triton.jit
def _by_threads(x, R: tl.constexpr, N: tl.constexpr):
    """x [R, N], whose columns are in memory order (t, a) of sizes 4 and N / 4, in the order (a, t)."""
    return tl.reshape(tl.permute(tl.reshape(x, [R, 4, N // 4]), [0, 2, 1]), [R, N])


@triton.jit
def _half_step(word):
    """h in float32 of words as in `layout.PackedKeyValues`, of which only the lowest 16 bits are read."""
    h = (((word.to(tl.int32) >> 7) & 511) << 18) + ((127 + LEAST_HALF_STEP) << 23)
    return h.to(tl.float32, bitcast=True)


@triton.jit
def _in_order(order, n, D: tl.constexpr):
    """Numbers n of a row of a key order, below D whatever a file says."""
    return tl.load(order + n).to(tl.int32) & (D - 1)


@triton.jit
def _bits_of(place, C: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr):
    """The bits of the numbers in these places of a row of C; keys may be ORDERED, as `layout.key_bits`."""
    bits = place * 0 + BITS
    if ORDERED:
        bits += tl.where(place < C // 2, 1 - place // 2 % 2 * 2, 0)
    return bits


@triton.jit
def _scale_and_low(word, bits):
    """The scale and the lowest number float32 of words as in `layout.PackedKeyValues`."""
    h = _half_step(word)
    z = ((word.to(tl.int32) & 127) - 64).to(tl.float32)
    below = tl.where(bits == 8, 255 / 16, tl.minimum((1 << bits) - 1, 15).to(tl.float32))
    return h * _power(1 - tl.maximum(bits - 4, 0)), (h * (z - below)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _pairs_of_scales(words, bits, PAIRS: tl.constexpr):
    """The scales and the lowest numbers, pairs of bfloat16, of pairs of words; of 3 to 5 bits if PAIRS."""
    if PAIRS:  # s is h for 5 bits and else 2 h; the lowest number is ((192 + z) h/s - 207 h/s) s, of 3 bits 199 for 207
        more, less = tl.maximum(bits - 4, 0), tl.maximum(4 - bits, 0)
        scale = ((words >> 5) & 0x07FC07FC) + (128 + LEAST_HALF_STEP - more) * 0x00800080
        part = (0x3F00 + more * 0x80) * 0x00010001
        least = 0xC2CF - 0x10000 + more * 0x80 - less * 8
        low = tl.inline_asm_elementwise(
            """{
            .reg .b32 n, none;
            mov.b32 none, 0x80008000;
            lop3.b32 n, $1, 0x007F007F, 0x43004300, 0xEA;
            fma.rn.bf16x2 n, n, $3, $4;
            fma.rn.bf16x2 $0, n, $2, none;
            }""",
            "=r,r,r,r,r", [words, scale, part, (least << 16) | (least & 0xFFFF)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return scale, low
    first, first_low = _scale_and_low(words, bits)
    second, second_low = _scale_and_low(words >> 16, bits)
    return _pair(first, second), _pair(first_low, second_low)


@triton.jit
def _pair(first, second):
    """Two numbers that bfloat16 has exactly in one word, the first in its lower half."""
    first, second = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    return ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def _by_rows(x, B: tl.constexpr, N: tl.constexpr):
    """x [B, N] of blocks of 32 rows for each row: [B * 32, N]."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [B, GROUP, N]), [B * GROUP, N])


@triton.jit
def _shifts(C: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr):
    """[C BITS / 32, 16 / BITS]: where codes begin in the halves of each word of a row of C numbers."""
    n, word = tl.arange(0, 16 // BITS)[None, :], tl.arange(0, C * BITS // 32)[:, None]
    shift = n * BITS + word * 0
    if ORDERED:  # a second code of 3 bits follows 5
        shift += tl.where(word < C * BITS // 64, n % 2, 0)
    return shift


@triton.jit
def _restored(
    codes, scales, rows, R: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr,
    PAIRS: tl.constexpr, out: tl.constexpr,
):  # fmt: skip
    """The numbers [C, R] of `rows` [R] at `codes` and `scales`, pairs of them in the order of `_by_threads`."""
    W: tl.constexpr = C * BITS // 32
    B: tl.constexpr = R // GROUP
    N: tl.constexpr = C // 2
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    scales = scales.to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(codes + rows[:, None] * W + tl.arange(0, W)[None, :])
    pairs = words[:, :, None] >> _shifts(C, BITS, ORDERED)[None, :, :]
    pairs = _by_threads(tl.reshape(pairs, [R, N]), R, N)
    words = _by_threads(tl.load(scales + tl.arange(0, B)[:, None] * N + tl.arange(0, N)[None, :]), B, N)
    bits = _by_threads(_bits_of(2 * tl.arange(0, N)[None, :], C, BITS, ORDERED), 1, N)
    ones = ((1 << bits) - 1) * 0x00010001
    scale, low = _pairs_of_scales(words, tl.broadcast_to(bits, words.shape), PAIRS)
    scale, low = _by_rows(scale, B, N), _by_rows(low, B, N)
    if PAIRS:
        x = tl.inline_asm_elementwise(
            """{
            .reg .b32 n, one, least;
            mov.b32 one, 0x3F803F80;
            mov.b32 least, 0xC300C300;
            lop3.b32 n, $1, $4, 0x43004300, 0xEA;
            fma.rn.bf16x2 n, n, one, least;
            fma.rn.bf16x2 $0, n, $2, $3;
            }""",
            "=r,r,r,r,r", [pairs, scale, low, tl.broadcast_to(ones, pairs.shape)], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        x = tl.join(x.to(tl.int16), (x >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        first = (pairs & ones & 0xFFFF).to(tl.float32)
        first = tl.fma(first, (scale << 16).to(tl.float32, bitcast=True), (low << 16).to(tl.float32, bitcast=True))
        second = ((pairs & ones) >> 16).to(tl.float32)
        scale, low = scale & -65536, low & -65536
        second = tl.fma(second, scale.to(tl.float32, bitcast=True), low.to(tl.float32, bitcast=True))
        x = tl.join(first.to(out), second.to(out))
    return tl.reshape(tl.permute(x, [1, 2, 0]), [C, R])


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


@triton.jit(do_not_specialize=["T", "rows"])
def round_tokens_kernel(x, y, T, rows, x_row, x_token, x_head, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """One program per R of the rows of y [B, T, HK, D]."""
    n = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, D)[None, :]
    at = n // HK // T * x_row + n // HK % T * x_token + n % HK * x_head
    m = (n < rows)[:, None]
    new = rounded_tokens(tl.load(x + at[:, None] + d, mask=m, other=0.0).to(tl.float32), R, D)
    tl.store(y + n[:, None] * D + d, new.to(y.dtype.element_ty), mask=m)


@triton.jit
def _in_page(
    key_codes, key_scales, value_codes, value_scales, pages, b, h, place, PER_PAGE: tl.constexpr,
    PAGES_ROW: tl.constexpr, KC_ROW: tl.constexpr, KS_ROW: tl.constexpr, VC_ROW: tl.constexpr, VS_ROW: tl.constexpr,
):  # fmt: skip
    """The tensors of the page that holds the group in `place` of row b, and the number of head h's group in it."""
    page = tl.load(pages + b * PAGES_ROW + place // PER_PAGE).to(tl.int64)
    n = h * PER_PAGE + place % PER_PAGE
    key_codes += page * KC_ROW
    key_scales += page * KS_ROW
    value_codes += page * VC_ROW
    value_scales += page * VS_ROW
    return key_codes, key_scales, value_codes, value_scales, n


@triton.jit
def _weights(s, seen, top, total, factor, CAP: tl.constexpr):
    """One tile of an online softmax (FlashAttention, arXiv 2205.14135): scores are in units of log 2."""
    s = tl.where(seen[None, :], cap_score(s * factor, CAP), float("-inf"))
    higher = tl.maximum(top, tl.max(s, axis=1))
    origin = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    p = tl.exp2(s - origin[:, None])
    fade = tl.exp2(top - origin)
    return p, higher, total * fade + tl.sum(p, axis=1), fade


@triton.jit
def _is_seen(i, j, window, sinks, limit):
    return (i - j < limit) & ((i - j < window) | (j < sinks))


@triton.jit(do_not_specialize=["spans", "span", "groups", "window", "sinks", "limit"])
def packed_span_kernel(
    q, key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, lengths, key_order, slots, pages,
    parts, weights, factor, groups, span, spans, window, sinks, limit,
    PER_PAGE: tl.constexpr, PAGES_ROW: tl.constexpr, KC_ROW: tl.constexpr, KS_ROW: tl.constexpr, VC_ROW: tl.constexpr,
    VS_ROW: tl.constexpr, KEYS_ROW: tl.constexpr, VALUES_ROW: tl.constexpr, TS_ROW: tl.constexpr,
    LENGTHS_ROW: tl.constexpr,
    HK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr,
    CAP: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and span of packed groups, for the HEADS query heads of the key head.

    The last span is that of the current group and the first tokens. Sums go to parts [B, HQ, spans, D], the maximum of
    the scores and the sum of exponentials to weights [B, HQ, spans, 2], all float32.
    """
    c = tl.program_id(0) % spans
    pair = (tl.program_id(0) // spans).to(tl.int64)
    if slots is None:
        i = tl.load(lengths + pair // HK) - 1
    else:  # row b of the cache is that of the slot; of what sequences share one token is read
        slot = tl.load(slots + pair // HK).to(tl.int64)
        i = tl.where(slot > 0, tl.load(lengths + slot * LENGTHS_ROW) - 1, 0)
        keys += slot * KEYS_ROW - pair // HK * (HK * TOKENS * D)
        values += slot * VALUES_ROW - pair // HK * (HK * TOKENS * D)
        token_scales += slot * TS_ROW - pair // HK * (HK * TOKENS * (4 * D // BLOCK))
    current = i // GROUP
    if pages is not None:  # noqa: SIM102 (known when the kernel is compiled)
        if (c < spans - 1) & (c * span >= current):  # a table of pages is as wide as the longest sequence may become
            out = (pair * HEADS + tl.arange(0, BM)) * spans + c
            tl.store(weights + 2 * out, float("-inf"), mask=tl.arange(0, BM) < HEADS)
            tl.store(weights + 2 * out + 1, 0.0, mask=tl.arange(0, BM) < HEADS)
            return
    g, d, r = tl.arange(0, BM), tl.arange(0, D), tl.arange(0, GROUP)
    m_q = (g < HEADS)[:, None]
    at_q = (pair * HEADS + g)[:, None]
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, D], tl.float32)
    # Column n of the products is channel, and row n of the keys token, ... of `_by_threads`.
    channel = (d // 2 % 4) * (D // 4) + d // 8 * 2 + d % 2
    token = (r // 2 % 4) * (GROUP // 4) + r // 8 * 2 + r % 2
    if c == spans - 1:
        q_MD = tl.load(q + at_q * D + d[None, :], mask=m_q, other=0.0)
        keys += pair * (TOKENS * D)
        values += pair * (TOKENS * D)
        token_scales += pair * (TOKENS * (4 * D // BLOCK))
        for start in range(0, TOKENS, 16):
            e = start + tl.arange(0, 16)
            j = tl.where(e < SINKS, e, current * GROUP + e - SINKS)
            seen = (j <= i) & (e < TOKENS) & (e >= tl.where(current > 0, 0, SINKS))
            k = load_tokens(keys, token_scales, e, seen, False, 16, D).to(q_MD.dtype)
            v = load_tokens(values, token_scales, e, seen, True, 16, D).to(q_MD.dtype)
            seen = seen & _is_seen(i, j, window, sinks, limit)
            s = tl.dot(q_MD, tl.trans(k), input_precision=PRECISION)
            p, top, total, fade = _weights(s, seen, top, total, factor, CAP)
            sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision=PRECISION)
    else:
        if key_order is not None:
            channel = _in_order(key_order + pair % HK * (2 * D), channel, D)
        q_MD = tl.load(q + at_q * D + channel[None, :], mask=m_q, other=0.0)
        if pages is None:
            first = pair * groups
            key_codes += first * (GROUP * D * BITS // 8)
            value_codes += first * (GROUP * D * BITS // 8)
            key_scales += first * D
            value_scales += first * D
        end = tl.minimum(c * span + span, tl.minimum(groups, current))
        for place in tl.range(c * span, end, num_stages=STAGES):
            kc, ks, vc, vs, n = key_codes, key_scales, value_codes, value_scales, place
            if pages is not None:
                kc, ks, vc, vs, n = _in_page(
                    kc, ks, vc, vs, pages, pair // HK, pair % HK, place, PER_PAGE, PAGES_ROW, KC_ROW, KS_ROW, VC_ROW,
                    VS_ROW,
                )  # fmt: skip
            at = n * (GROUP * D * BITS // 8)
            k = _restored(kc + at, ks + n * D, token, GROUP, D, BITS, key_order is not None, PAIRS, q_MD.dtype)
            v = _restored(vc + at, vs + n * D, d, D, GROUP, BITS, False, PAIRS, q_MD.dtype)
            s = tl.dot(q_MD, k, input_precision=PRECISION)
            j = (current - 1 - (current - 1 - place) % groups) * GROUP + token
            seen = (j >= SINKS) & _is_seen(i, j, window, sinks, limit)
            p, top, total, fade = _weights(s, seen, top, total, factor, CAP)
            sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision=PRECISION)
    at_q = at_q * spans + c
    out = (pair * HEADS + g) * spans + c
    tl.store(weights + 2 * out, top, mask=g < HEADS)
    tl.store(weights + 2 * out + 1, total, mask=g < HEADS)
    tl.store(parts + at_q * D + d[None, :], sums, mask=m_q)


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
    scale, low = _scale_and_low(word, bits)
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
        place = _in_order(order + C, c, C)
    bits = _bits_of(place, C, BITS, order is not None)[None, None, :]
    x = tl.reshape(x, [B, GROUP, C])
    n, word, scale, low = _quantise(x, tl.min(x, axis=1)[:, None, :], tl.max(x, axis=1)[:, None, :], bits)
    if kept:
        at = scales + tl.arange(0, B)[:, None] * C + place[None, :]
        tl.store(at, tl.reshape(word, [B, C]).to(tl.int16))
        in_places = tl.reshape(n, [R, C])
        if order is not None:
            in_places = tl.gather(in_places, tl.broadcast_to(_in_order(order, c, C)[None, :], [R, C]), 1)
        shift = _shifts(C, BITS, order is not None)[:, :, None] + tl.arange(0, 2)[None, None, :] * 16
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
    bits = _bits_of(place, C, BITS, ORDERED)
    scale, low = _scale_and_low(scales, bits)
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
        place = _in_order(order + D, d, D)
    words = tl.load(kc + r * (D // PER_WORD) + place // PER_WORD)
    k = _unpacked(words, tl.load(key_scales + place), place, D, BITS, order is not None)
    words = tl.load(vc + d * BITS + r // PER_WORD)
    part = d // GROUP * GROUP + r
    v = _unpacked(words, tl.load(value_scales + part), r, GROUP, BITS, False)
    return k, v


@triton.jit
def copy_group(codes, scales, group, new_codes, new_scales, place, D: tl.constexpr, BITS: tl.constexpr):
    """Copies the codes and scales of number `group` of all packed groups to number `place` of others."""
    codes = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    new_codes = new_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    w, s = tl.arange(0, D * BITS), tl.arange(0, D)
    tl.store(new_codes + place * (D * BITS) + w, tl.load(codes + group * (D * BITS) + w))
    tl.store(new_scales + place * D + s, tl.load(scales + group * D + s))


@triton.jit
def pack_kernel(
    k, v, key_codes, key_scales, value_codes, value_scales, key_order, groups, k_row, k_head, k_token, v_row, v_head,
    v_token,
    HK: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and group of 32 tokens."""
    n = tl.program_id(0) % groups
    pair = (tl.program_id(0) // groups).to(tl.int64)
    k += pair // HK * k_row + pair % HK * k_head + n.to(tl.int64) * GROUP * k_token
    v += pair // HK * v_row + pair % HK * v_head + n.to(tl.int64) * GROUP * v_token
    if key_order is not None:
        key_order += pair % HK * (2 * D)
    pack_group(
        k, v, k_token, v_token, key_codes, key_scales, value_codes, value_scales, key_order, pair * groups + n, True,
        D, BITS,
    )  # fmt: skip


@triton.jit
def append_kernel(
    key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, lengths, key_order, slots, pages,
    q, k, v, cos, sin, turned_q, groups, q_row, k_row, v_row,
    PER_PAGE: tl.constexpr, PAGES_ROW: tl.constexpr, KC_ROW: tl.constexpr, KS_ROW: tl.constexpr, VC_ROW: tl.constexpr,
    VS_ROW: tl.constexpr, KEYS_ROW: tl.constexpr, VALUES_ROW: tl.constexpr, TS_ROW: tl.constexpr,
    LENGTHS_ROW: tl.constexpr,
    HK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr,
    ROPE_ROWS: tl.constexpr, COUNT_BITS: tl.constexpr,
):  # fmt: skip
    """One program per row and key head: packs the group that is complete, if it is, and puts a token.

    The first R channels of keys and queries are rotated; the queries [B, HQ, D] go to turned_q, if there are any.
    Tokens of q, k and v are x_row elements apart.
    """
    pair = tl.program_id(0).to(tl.int64)
    b, h = pair // HK, pair % HK
    if slots is None:
        number = take_ticket(lengths, b, 1, HK, COUNT_BITS) - 1
    else:  # row b of the cache is that of the slot; the tickets of what sequences share say nothing
        slot = tl.load(slots + b).to(tl.int64)
        number = take_ticket(lengths, slot * LENGTHS_ROW, 1, HK, COUNT_BITS) - 1
        number = tl.where(slot > 0, number, 0)
        keys += slot * KEYS_ROW - b * (HK * TOKENS * D)
        values += slot * VALUES_ROW - b * (HK * TOKENS * D)
        token_scales += slot * TS_ROW - b * (HK * TOKENS * (4 * D // BLOCK))
    if key_order is not None:
        key_order += h * (2 * D)
    d = tl.arange(0, D)
    m_d = d < D
    keys += pair * (TOKENS * D)
    values += pair * (TOKENS * D)
    token_scales += pair * (TOKENS * (4 * D // BLOCK))
    if (number > 0) & (number % GROUP == 0) & (groups > 0):
        place = (number // GROUP - 1) % tl.maximum(groups, 1)
        kc, ks, vc, vs, n = key_codes, key_scales, value_codes, value_scales, pair * groups + place
        if pages is not None:
            kc, ks, vc, vs, n = _in_page(
                kc, ks, vc, vs, pages, b, h, place, PER_PAGE, PAGES_ROW, KC_ROW, KS_ROW, VC_ROW, VS_ROW
            )  # fmt: skip
        own = tl.arange(0, GROUP) + SINKS
        own_k = load_tokens(keys, token_scales, own, own > 0, False, GROUP, D)
        own_v = tl.trans(load_tokens(values, token_scales, own, own > 0, True, GROUP, D))
        pack_loaded(own_k, own_v, kc, ks, vc, vs, key_order, n, True, D, BITS)
        tl.debug_barrier()  # all of the group is read before its first place is written
    # Its place in its group, and among the first tokens.
    is_first = tl.arange(0, 2) == 1
    place = tl.where(is_first, number, number % GROUP + SINKS)
    is_held = tl.where(is_first, number, 0) < SINKS
    new_k = turned(k + b * k_row + h * D, cos, sin, b, d, m_d, R, ROPE_ROWS)
    new_v = tl.load(v + b * v_row + h * D + d).to(tl.float32)
    store_tokens(tl.broadcast_to(new_k[None, :], [2, D]), keys, token_scales, place, is_held, False, 2, D)
    store_tokens(tl.broadcast_to(new_v[None, :], [2, D]), values, token_scales, place, is_held, True, 2, D)
    if R > 0:
        for g in range(HEADS):
            new_q = turned(q + b * q_row + (h * HEADS + g) * D, cos, sin, b, d, m_d, R, ROPE_ROWS)
            tl.store(turned_q + (pair * HEADS + g) * D + d, new_q.to(turned_q.dtype.element_ty))
