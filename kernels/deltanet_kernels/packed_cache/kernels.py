"""The kernels on a packed cache: attention over a span of its groups, appending a token, and packing a prompt.

A channel d and the channel d + D / 2 share a byte of 4-bit codes, so each tile is two halves of H = D / 2 channels: a
score is the sum of two products, and an output is two accumulators. Nothing is shuffled.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.packed_cache import layout
from deltanet_kernels.window.softcap import cap_score

GROUP = tl.constexpr(layout.GROUP)
SINKS = tl.constexpr(layout.SINKS)
LEAST_SCALE = tl.constexpr(layout.LEAST_SCALE)


@triton.jit
def _load_codes(codes, rows, h, m, H: tl.constexpr, BITS: tl.constexpr):
    """The codes [R, H] of both halves of `rows` [R], as float32."""
    at = codes + rows.to(tl.int64)[:, None] * (H * BITS // 4) + h[None, :]
    low = tl.load(at, mask=m[:, None], other=0)
    if BITS == 4:
        high = low >> 4
        low = low & 15
    else:
        high = tl.load(at + H, mask=m[:, None], other=0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _restore_keys(codes, scales, groups, m, h, OFFSET: tl.constexpr, H: tl.constexpr, P: tl.constexpr, out):
    """Keys [P * 32, H] of one half from their codes and the scales of `groups` [P]."""
    at = scales + groups.to(tl.int64)[:, None] * (4 * H) + OFFSET + h[None, :]
    scale = tl.maximum(tl.load(at, mask=m[:, None], other=0.0).to(tl.float32), LEAST_SCALE)
    low = tl.load(at + 2 * H, mask=m[:, None], other=0.0).to(tl.float32)
    x = tl.reshape(codes, [P, GROUP, H]) * scale[:, None, :] + low[:, None, :]
    return tl.reshape(x, [P * GROUP, H]).to(out)


@triton.jit
def _restore_values(codes, scales, rows, m, OFFSET: tl.constexpr, H: tl.constexpr, R: tl.constexpr, out):
    """Values [R, H] of one half from their codes and the scales of `rows` [R]."""
    at = scales + rows.to(tl.int64)[:, None] * (4 * H // GROUP) + OFFSET // GROUP + tl.arange(0, H // GROUP)[None, :]
    scale = tl.maximum(tl.load(at, mask=m[:, None], other=0.0).to(tl.float32), LEAST_SCALE)
    low = tl.load(at + 2 * H // GROUP, mask=m[:, None], other=0.0).to(tl.float32)
    x = tl.reshape(codes, [R, H // GROUP, GROUP]) * scale[:, :, None] + low[:, :, None]
    return tl.reshape(x, [R, H]).to(out)


@triton.jit
def _attend(
    q_low, q_high, k_low, k_high, v_low, v_high, seen, top, total, sums_low, sums_high, factor,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of an online softmax (FlashAttention, arXiv 2205.14135); scores are in units of log 2."""
    s = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
    s = tl.dot(q_high, tl.trans(k_high), s, input_precision=PRECISION) * factor
    s = tl.where(seen[None, :], cap_score(s, CAP), float("-inf"))
    higher = tl.maximum(top, tl.max(s, axis=1))
    origin = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
    p = tl.exp2(s - origin[:, None])
    fade = tl.exp2(top - origin)
    total = total * fade + tl.sum(p, axis=1)
    p = p.to(v_low.dtype)
    sums_low = tl.dot(p, v_low, sums_low * fade[:, None], input_precision=PRECISION)
    sums_high = tl.dot(p, v_high, sums_high * fade[:, None], input_precision=PRECISION)
    return higher, total, sums_low, sums_high


@triton.jit
def _is_seen(i, j, window, sinks, limit):
    return (i - j < limit) & ((i - j < window) | (j < sinks))


@triton.jit(do_not_specialize=["spans", "window", "sinks", "limit"])
def packed_span_kernel(
    q, key_codes, key_scales, value_codes, value_scales, keys, values, lengths, parts, weights, factor,
    groups, span, spans, window, sinks, limit,
    HK: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, P: tl.constexpr,
    CAP: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and span of packed groups, for the HEADS query heads of the key head.

    The first span reads the current group and the first tokens too. Sums go to parts [B, HQ, spans, D], the maximum of
    the scores and the sum of exponentials to weights [B, HQ, spans, 2], all float32.
    """
    c = tl.program_id(0) % spans
    pair = (tl.program_id(0) // spans).to(tl.int64)
    i = tl.load(lengths + pair // HK) - 1
    current = i // GROUP
    g, h, e = tl.arange(0, BM), tl.arange(0, H), tl.arange(0, 2 * GROUP)
    rows = tl.arange(0, P * GROUP)
    m_q = (g < HEADS)[:, None]
    at_q = q + (pair * HEADS + g)[:, None] * (2 * H) + h[None, :]
    q_low = tl.load(at_q, mask=m_q, other=0.0)
    q_high = tl.load(at_q + H, mask=m_q, other=0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums_low = tl.zeros([BM, H], tl.float32)
    sums_high = tl.zeros([BM, H], tl.float32)
    if c == 0:
        j = tl.where(e < SINKS, e, current * GROUP + e - SINKS)
        held = (j <= i) & (e < SINKS + GROUP) & (e >= tl.where(current > 0, 0, SINKS))
        at = pair * ((SINKS + GROUP) * 2 * H) + e[:, None] * (2 * H) + h[None, :]
        k_low = tl.load(keys + at, mask=held[:, None], other=0.0)
        k_high = tl.load(keys + at + H, mask=held[:, None], other=0.0)
        v_low = tl.load(values + at, mask=held[:, None], other=0.0)
        v_high = tl.load(values + at + H, mask=held[:, None], other=0.0)
        seen = held & _is_seen(i, j, window, sinks, limit)
        top, total, sums_low, sums_high = _attend(
            q_low, q_high, k_low, k_high, v_low, v_high, seen, top, total, sums_low, sums_high, factor, CAP, PRECISION
        )
    first = pair * groups
    key_codes += first * (GROUP * H * BITS // 4)
    value_codes += first * (GROUP * H * BITS // 4)
    key_scales += first * (4 * H)
    value_scales += first * (4 * H)
    end = tl.minimum(c * span + span, tl.minimum(groups, current))
    for start in tl.range(c * span, end, P, num_stages=STAGES):
        place = start + rows // GROUP
        m = place < end
        group = current - 1 - tl.maximum(current - 1 - place, 0) % groups
        j = group * GROUP + rows % GROUP
        at = start * GROUP + rows
        some = start + tl.arange(0, P)
        codes_low, codes_high = _load_codes(key_codes, at, h, m, H, BITS)
        k_low = _restore_keys(codes_low, key_scales, some, some < end, h, 0, H, P, q_low.dtype)
        k_high = _restore_keys(codes_high, key_scales, some, some < end, h, H, H, P, q_low.dtype)
        codes_low, codes_high = _load_codes(value_codes, at, h, m, H, BITS)
        v_low = _restore_values(codes_low, value_scales, at, m, 0, H, P * GROUP, q_low.dtype)
        v_high = _restore_values(codes_high, value_scales, at, m, H, H, P * GROUP, q_low.dtype)
        seen = m & (j >= SINKS) & _is_seen(i, j, window, sinks, limit)
        top, total, sums_low, sums_high = _attend(
            q_low, q_high, k_low, k_high, v_low, v_high, seen, top, total, sums_low, sums_high, factor, CAP, PRECISION
        )
    out = (pair * HEADS + g) * spans + c
    tl.store(weights + 2 * out, top, mask=g < HEADS)
    tl.store(weights + 2 * out + 1, total, mask=g < HEADS)
    tl.store(parts + out[:, None] * (2 * H) + h[None, :], sums_low, mask=m_q)
    tl.store(parts + out[:, None] * (2 * H) + H + h[None, :], sums_high, mask=m_q)


@triton.jit
def _quantise(x, low, high, BITS: tl.constexpr):
    """Codes of x, and the scale and the lowest number as they are stored; `low` and `high` have the shape of x or 1."""
    low = low.to(tl.bfloat16)
    scale = tl.div_rn(high - low.to(tl.float32), tl.zeros_like(high) + (2**BITS - 1)).to(tl.bfloat16)
    divisor = tl.maximum(scale.to(tl.float32), LEAST_SCALE)
    steps = tl.div_rn(x - low.to(tl.float32), tl.broadcast_to(divisor, x.shape))
    codes = tl.minimum(tl.maximum(steps, 0.0), 2.0**BITS - 1)
    codes = (codes + 8388608.0) - 8388608.0  # to the nearest whole number, ties to even
    return codes.to(tl.uint8), scale, low


@triton.jit
def _store_codes(codes, at, low, high, H: tl.constexpr, BITS: tl.constexpr):
    if BITS == 4:
        tl.store(codes + at, low | (high << 4))
    else:
        tl.store(codes + at, low)
        tl.store(codes + at + H, high)


@triton.jit
def _pack_values(x, scales, at, H: tl.constexpr, BITS: tl.constexpr):
    x = tl.reshape(x, [GROUP, H // GROUP, GROUP])
    low = tl.min(x, axis=2)
    codes, scale, low = _quantise(x, low[:, :, None], tl.max(x, axis=2)[:, :, None], BITS)
    tl.store(scales + at, tl.reshape(scale, [GROUP, H // GROUP]))
    tl.store(scales + at + 2 * H // GROUP, tl.reshape(low, [GROUP, H // GROUP]))
    return tl.reshape(codes, [GROUP, H])


@triton.jit
def _pack_keys(x, scales, at, H: tl.constexpr, BITS: tl.constexpr):
    codes, scale, low = _quantise(x, tl.min(x, axis=0)[None, :], tl.max(x, axis=0)[None, :], BITS)
    tl.store(scales + at, scale)
    tl.store(scales + at + 2 * H, low)
    return codes


@triton.jit
def _pack_group(
    keys, values, k_token, v_token, key_codes, key_scales, value_codes, value_scales, group,
    H: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Pack the 32 tokens at `keys` and `values`, `k_token` and `v_token` elements apart, as number `group` of all."""
    r, h = tl.arange(0, GROUP)[:, None], tl.arange(0, H)[None, :]
    at = (group * GROUP + r) * (H * BITS // 4) + h
    x = keys + r.to(tl.int64) * k_token + h
    at_scale = group * (4 * H) + h
    low = _pack_keys(tl.load(x).to(tl.float32), key_scales, at_scale, H, BITS)
    high = _pack_keys(tl.load(x + H).to(tl.float32), key_scales, at_scale + H, H, BITS)
    _store_codes(key_codes, at, low, high, H, BITS)
    x = values + r.to(tl.int64) * v_token + h
    at_scale = (group * GROUP + r) * (4 * H // GROUP) + tl.arange(0, H // GROUP)[None, :]
    low = _pack_values(tl.load(x).to(tl.float32), value_scales, at_scale, H, BITS)
    high = _pack_values(tl.load(x + H).to(tl.float32), value_scales, at_scale + H // GROUP, H, BITS)
    _store_codes(value_codes, at, low, high, H, BITS)


@triton.jit
def pack_kernel(
    k, v, key_codes, key_scales, value_codes, value_scales, groups, k_row, k_head, k_token, v_row, v_head, v_token,
    HK: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and group of 32 tokens."""
    n = tl.program_id(0) % groups
    pair = (tl.program_id(0) // groups).to(tl.int64)
    k += pair // HK * k_row + pair % HK * k_head + n.to(tl.int64) * GROUP * k_token
    v += pair // HK * v_row + pair % HK * v_head + n.to(tl.int64) * GROUP * v_token
    _pack_group(k, v, k_token, v_token, key_codes, key_scales, value_codes, value_scales, pair * groups + n, H, BITS)


@triton.jit
def append_kernel(
    key_codes, key_scales, value_codes, value_scales, keys, values, lengths, k, v, groups, k_row, k_head, v_row, v_head,
    HK: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per row and key head: packs the group that is complete, if it is, and puts a token."""
    pair = tl.program_id(0).to(tl.int64)
    number = tl.load(lengths + pair // HK)
    d = tl.arange(0, 2 * H)
    keys += pair * ((SINKS + GROUP) * 2 * H)
    values += pair * ((SINKS + GROUP) * 2 * H)
    if (number > 0) & (number % GROUP == 0) & (groups > 0):
        place = (number // GROUP - 1) % tl.maximum(groups, 1)
        own = SINKS * 2 * H
        _pack_group(
            keys + own, values + own, 2 * H, 2 * H, key_codes, key_scales, value_codes, value_scales,
            pair * groups + place, H, BITS,
        )  # fmt: skip
        tl.debug_barrier()  # all of the group is read before its first place is written
    new_k = tl.load(k + pair // HK * k_row + pair % HK * k_head + d)
    new_v = tl.load(v + pair // HK * v_row + pair % HK * v_head + d)
    at = (SINKS + number % GROUP) * (2 * H) + d
    tl.store(keys + at, new_k)
    tl.store(values + at, new_v)
    first = tl.zeros_like(d) + number < SINKS
    tl.store(keys + number * (2 * H) + d, new_k, mask=first)
    tl.store(values + number * (2 * H) + d, new_v, mask=first)
