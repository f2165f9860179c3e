"""The kernels on a packed cache: attention over a span of its groups, and appending a token.

A thread of the tensor cores' products holds pairs of neighbouring numbers. The codes lie in the order in which threads
hold them (`layout.py`), so that the words that a thread loads are the numbers that it multiplies, and none goes through
shared memory: columns are channels, and tokens within a group, in the order of `_by_threads`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from deltanet_kernels.common.token_step import take_ticket, turned
from deltanet_kernels.packed_cache.numbers import (
    BLOCK,
    GROUP,
    LEAST_HALF_STEP,
    SINKS,
    TOKENS,
    bits_of,
    in_order,
    load_tokens,
    pack_group,
    pack_loaded,
    rounded_tokens,
    scale_and_low,
    shifts,
    store_tokens,
)
from deltanet_kernels.window.softcap import cap_score


@triton.jit
def _by_threads(x, R: tl.constexpr, N: tl.constexpr):
    """x [R, N], whose columns are in memory order (t, a) of sizes 4 and N / 4, in the order (a, t)."""
    return tl.reshape(tl.permute(tl.reshape(x, [R, 4, N // 4]), [0, 2, 1]), [R, N])


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
    first, first_low = scale_and_low(words, bits)
    second, second_low = scale_and_low(words >> 16, bits)
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
def restored_group(
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
    pairs = words[:, :, None] >> shifts(C, BITS, ORDERED)[None, :, :]
    pairs = _by_threads(tl.reshape(pairs, [R, N]), R, N)
    words = _by_threads(tl.load(scales + tl.arange(0, B)[:, None] * N + tl.arange(0, N)[None, :]), B, N)
    bits = _by_threads(bits_of(2 * tl.arange(0, N)[None, :], C, BITS, ORDERED), 1, N)
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
def _round_rows(x, y, n, T, rows, x_row, x_token, x_head, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """The rows n [R] of y [B, T, HK, D]."""
    d = tl.arange(0, D)[None, :]
    at = n // HK // T * x_row + n // HK % T * x_token + n % HK * x_head
    m = (n < rows)[:, None]
    new = rounded_tokens(tl.load(x + at[:, None] + d, mask=m, other=0.0).to(tl.float32), R, D)
    tl.store(y + n[:, None] * D + d, new.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "rows"])
def round_tokens_kernel(
    k, v, new_k, new_v, T, rows, k_row, k_token, k_head, v_row, v_token, v_head,
    HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program per R of the rows of new_k and new_v [B, T, HK, D]."""
    n = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    _round_rows(k, new_k, n, T, rows, k_row, k_token, k_head, HK, D, R)
    _round_rows(v, new_v, n, T, rows, v_row, v_token, v_head, HK, D, R)


class Places(NamedTuple):
    """Where the rows of a cache are whose sequences have indices: a compile-time constant of the kernels."""

    PER_PAGE: int
    """Groups of a page, 0 where a row has one page; from here on elements from a row of a tensor to its next."""
    PAGES_ROW: int
    KC_ROW: int
    KS_ROW: int
    VC_ROW: int
    VS_ROW: int
    KEYS_ROW: int
    VALUES_ROW: int
    TS_ROW: int
    LENGTHS_ROW: int


@triton.jit
def in_page(key_codes, key_scales, value_codes, value_scales, pages, b, h, place, groups, PLACES: tl.constexpr):
    """The tensors of the page that holds the group in `place` of row b, and the number of head h's group in it.

    A row has `groups` groups.
    """
    if PLACES.PER_PAGE == 0:
        page = tl.load(pages + b * PLACES.PAGES_ROW).to(tl.int64)
        n = h * groups + place
    else:
        page = tl.load(pages + b * PLACES.PAGES_ROW + place // PLACES.PER_PAGE).to(tl.int64)
        n = h * PLACES.PER_PAGE + place % PLACES.PER_PAGE
    key_codes += page * PLACES.KC_ROW
    key_scales += page * PLACES.KS_ROW
    value_codes += page * PLACES.VC_ROW
    value_scales += page * PLACES.VS_ROW
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
def _is_seen(i, j, window, sinks, limit, EDGE: tl.constexpr):
    return (i - j < limit) & ((i // EDGE * EDGE - j < window) | (j < sinks))


@triton.jit(do_not_specialize=["spans", "span", "groups", "window", "sinks", "limit"])
def packed_span_kernel(
    q, first_q, key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, lengths, key_order,
    state_indices, pages, parts, weights, factor, groups, span, spans, window, sinks, limit,
    PLACES: tl.constexpr, HK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr,
    CAP: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and span of packed groups, for the HEADS query heads of the key head.

    The last span is that of the current group and the first tokens. Sums go to parts [B, HQ, spans, D], the maximum of
    the scores and the sum of exponentials to weights [B, HQ, spans, 2], all float32.
    """
    c = tl.program_id(0) % spans
    pair = (tl.program_id(0) // spans).to(tl.int64)
    if state_indices is None:
        i = tl.load(lengths + pair // HK) - 1
    else:  # row b of the cache is that of the index; of what sequences share one token is read
        state_index = tl.load(state_indices + pair // HK).to(tl.int64)
        i = tl.where(state_index > 0, tl.load(lengths + state_index * PLACES.LENGTHS_ROW) - 1, 0)
        keys += state_index * PLACES.KEYS_ROW - pair // HK * (HK * TOKENS * D)
        values += state_index * PLACES.VALUES_ROW - pair // HK * (HK * TOKENS * D)
        token_scales += state_index * PLACES.TS_ROW - pair // HK * (HK * TOKENS * (4 * D // BLOCK))
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
            seen = seen & _is_seen(i, j, window, sinks, limit, EDGE)
            s = tl.dot(q_MD, tl.trans(k), input_precision=PRECISION)
            if first_q is not None:
                first_MD = tl.load(first_q + at_q * D + d[None, :], mask=m_q, other=0.0)
                first = tl.dot(first_MD, tl.trans(k), input_precision=PRECISION)
                s = tl.where((e < SINKS)[None, :], first, s)
            p, top, total, fade = _weights(s, seen, top, total, factor, CAP)
            sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision=PRECISION)
    else:
        if key_order is not None:
            channel = in_order(key_order + pair % HK * (2 * D), channel, D)
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
                kc, ks, vc, vs, n = in_page(kc, ks, vc, vs, pages, pair // HK, pair % HK, place, groups, PLACES)
            at = n * (GROUP * D * BITS // 8)
            k = restored_group(kc + at, ks + n * D, token, GROUP, D, BITS, key_order is not None, PAIRS, q_MD.dtype)
            v = restored_group(vc + at, vs + n * D, d, D, GROUP, BITS, False, PAIRS, q_MD.dtype)
            s = tl.dot(q_MD, k, input_precision=PRECISION)
            j = (current - 1 - (current - 1 - place) % groups) * GROUP + token
            seen = (j >= SINKS) & _is_seen(i, j, window, sinks, limit, EDGE)
            p, top, total, fade = _weights(s, seen, top, total, factor, CAP)
            sums = tl.dot(p.to(v.dtype), v, sums * fade[:, None], input_precision=PRECISION)
    at_q = at_q * spans + c
    out = (pair * HEADS + g) * spans + c
    tl.store(weights + 2 * out, top, mask=g < HEADS)
    tl.store(weights + 2 * out + 1, total, mask=g < HEADS)
    tl.store(parts + at_q * D + d[None, :], sums, mask=m_q)


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
def put_token(
    number, key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, key_order, pages, q, k, v,
    cos, sin, turned_q, groups, q_row, k_row, v_row, pair, b, h,
    PLACES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
):  # fmt: skip
    """Packs the group that is complete, if it is, and puts the token with this number from 0: head h of row b.

    The first R channels of keys and queries are rotated; the queries [B, HQ, D] go to turned_q, if there are any.
    Tokens of q, k and v are x_row elements apart.
    """
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
            kc, ks, vc, vs, n = in_page(kc, ks, vc, vs, pages, b, h, place, groups, PLACES)
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
        g = tl.arange(0, BM)[:, None]
        new_q = turned(q + b * q_row + (h * HEADS + g) * D, cos, sin, b, d[None, :], g < HEADS, R, ROPE_ROWS)
        tl.store(turned_q + (pair * HEADS + g) * D + d[None, :], new_q.to(turned_q.dtype.element_ty), mask=g < HEADS)


@triton.jit
def next_token(
    keys, values, token_scales, lengths, state_indices, b,
    PLACES: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, COUNT_BITS: tl.constexpr,
):  # fmt: skip
    """Of sequence b, the number of its next token from 0, its row, and tensors of tokens whose row b that row is."""
    if state_indices is None:
        row = b
        number = take_ticket(lengths, b, 1, HK, COUNT_BITS) - 1
    else:  # the tickets of what sequences share say nothing
        row = tl.load(state_indices + b).to(tl.int64)
        number = take_ticket(lengths, row * PLACES.LENGTHS_ROW, 1, HK, COUNT_BITS) - 1
        number = tl.where(row > 0, number, 0)
        keys += row * PLACES.KEYS_ROW - b * (HK * TOKENS * D)
        values += row * PLACES.VALUES_ROW - b * (HK * TOKENS * D)
        token_scales += row * PLACES.TS_ROW - b * (HK * TOKENS * (4 * D // BLOCK))
    return number, row, keys, values, token_scales


@triton.jit
def append_kernel(
    key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, lengths, key_order,
    state_indices, pages, q, k, v, cos, sin, turned_q, groups, q_row, k_row, v_row,
    PLACES: tl.constexpr, HK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, ROPE_ROWS: tl.constexpr, COUNT_BITS: tl.constexpr,
):  # fmt: skip
    """One program per row and key head; the rest is as in `put_token`."""
    pair = tl.program_id(0).to(tl.int64)
    b, h = pair // HK, pair % HK
    number, _, keys, values, token_scales = next_token(
        keys, values, token_scales, lengths, state_indices, b, PLACES, HK, D, COUNT_BITS
    )
    put_token(
        number, key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, key_order, pages, q, k, v,
        cos, sin, turned_q, groups, q_row, k_row, v_row, pair, b, h, PLACES, HEADS, D, BITS, BM, R, ROPE_ROWS,
    )  # fmt: skip
