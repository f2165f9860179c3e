"""The kernels of a prompt or a part of one: a cache of its keys and values with what later groups see of them, and its
attention."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import HIDDEN, LOG2E
from deltanet_kernels.packed_cache.numbers import (
    BLOCK,
    GROUP,
    SINKS,
    TOKENS,
    clear_group,
    copy_group,
    pack_loaded,
    store_tokens,
    unpack_group,
)
from deltanet_kernels.window.forward import attend_tile
from deltanet_kernels.window.tiles import in_sinks, in_window, is_partly_seen, load_rows, store_rows


@triton.jit
def _tokens(x, old, j, d, token, before, end, begun, D: tl.constexpr):
    """Channels d of the tokens j, zero from `end` on: those from `before` on are in x, whose rows are
    `token` elements apart, and earlier ones, of the group `begun` and of the first four, in `old` [36, D]."""
    found = tl.load(x + j.to(tl.int64) * token + d, mask=(j >= before) & (j < end), other=0.0)
    if old is not None:
        place = tl.where(j < SINKS, j, j - begun * GROUP + SINKS)
        is_old = (j < before) & (j < end)
        found = tl.where(is_old, tl.load(old + place * D + d, mask=is_old, other=0.0), found)
    return found


@triton.jit
def first_place(b, begin, held):
    """The first of the restored numbers of sequence b, which begins with token `begin` of a row of several.

    Before its own tokens, each has as many places as the old cache has groups, and one group for what is not full.
    """
    return b * (held + 1) * GROUP + begin


@triton.jit(do_not_specialize=["T", "groups", "held", "last", "programs"])
def pack_prompt_kernel(
    k, v, key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, lengths, seen_k, seen_v, length,
    old_key_codes, old_key_scales, old_value_codes, old_value_scales, old_keys, old_values, old_lengths, starts,
    key_order, T, groups, held, last, programs, k_row, k_token, k_head, v_row, v_token, v_head,
    HK: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and group of 32 tokens, or place of one; the last one copies the first tokens and
    the group of the last token before `end`.

    A ring of `groups` groups is kept; places that no group has taken are not read, but filled with zeros. The restored
    numbers of complete groups before the last token go to seen_k and seen_v [B, last * 32, HK, D]. The tokens may come
    after those of an old cache, a ring of `held` groups; then the groups are those from the first that it holds. With
    `starts` [B + 1] the sequences are parts of one row; T is the most tokens of one, and places of seen_k and seen_v
    begin as `first_place` says.
    """
    n = tl.program_id(0) % programs
    pair = (tl.program_id(0) // programs).to(tl.int64)
    b, h = pair // HK, pair % HK
    seen = b * last * GROUP
    if starts is None:
        k += b * k_row
        v += b * v_row
    else:
        begin = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - begin).to(tl.int32)
        seen = first_place(b, begin, held)
        k += begin * k_token
        v += begin * v_token
    k += h * k_head
    v += h * v_head
    if key_order is not None:
        key_order += h * (2 * D)
    before, begun, base = 0, 0, 0
    if old_lengths is not None:
        before = tl.load(old_lengths + b)
        begun = tl.maximum(before - 1, 0) // GROUP
        base = tl.maximum(begun - held, 0)
        k -= before.to(tl.int64) * k_token
        v -= before.to(tl.int64) * v_token
        old_keys += pair * (TOKENS * D)
        old_values += pair * (TOKENS * D)
    total = before + T
    end = total if length is None else tl.load(length).to(tl.int32)
    current = tl.maximum(end - 1, 0) // GROUP
    r, d = tl.arange(0, GROUP), tl.arange(0, D)
    if n == programs - 1:
        keys += pair * (TOKENS * D)
        values += pair * (TOKENS * D)
        token_scales += pair * (TOKENS * (4 * D // BLOCK))
        # The first SINKS rows are the first tokens, and 32 of the others the group of the last one.
        e = tl.arange(0, 2 * GROUP)
        number = tl.where(e < SINKS, e, current * GROUP + e - SINKS)[:, None]
        some_k = _tokens(k, old_keys, number, d[None, :], k_token, before, end, begun, D).to(tl.float32)
        some_v = _tokens(v, old_values, number, d[None, :], v_token, before, end, begun, D).to(tl.float32)
        store_tokens(some_k, keys, token_scales, e, e < TOKENS, False, 2 * GROUP, D)
        store_tokens(some_v, values, token_scales, e, e < TOKENS, True, 2 * GROUP, D)
        tl.store(lengths + b, end)
    else:
        g = base + n
        j = g * GROUP + r
        group = pair * groups + g % tl.maximum(groups, 1)
        is_kept = (g >= current - groups) & (g < current)
        if (g >= current) & (g < groups):
            clear_group(key_codes, key_scales, group, D, BITS)
            clear_group(value_codes, value_scales, group, D, BITS)
        rows = (seen + n * GROUP + r) * HK + h
        first = tl.minimum(total, SINKS)  # tokens that are not seen packed
        is_sink = j < SINKS
        if old_lengths is not None:  # noqa: SIM102 (known when the kernel is compiled)
            if g < begun:
                held_at = pair * held + g % tl.maximum(held, 1)
                if is_kept:
                    copy_group(old_key_codes, old_key_scales, held_at, key_codes, key_scales, group, D, BITS)
                    copy_group(old_value_codes, old_value_scales, held_at, value_codes, value_scales, group, D, BITS)
                new_k, new_v = unpack_group(
                    old_key_codes, old_key_scales, old_value_codes, old_value_scales, key_order, held_at, D, BITS
                )
                at = rows[:, None] * D + d[None, :]
                old_k = _tokens(k, old_keys, j[:, None], d[None, :], k_token, before, first, begun, D)
                tl.store(seen_k + at, tl.where(is_sink[:, None], old_k, new_k.to(old_k.dtype)))
                old_v = _tokens(v, old_values, j[:, None], d[None, :], v_token, before, first, begun, D)
                tl.store(seen_v + at, tl.where(is_sink[:, None], old_v, new_v.to(old_v.dtype)))
        if (g >= begun) & (g < (total - 1) // GROUP):
            own_k = _tokens(k, old_keys, j[:, None], d[None, :], k_token, before, total, begun, D)
            own_v = _tokens(v, old_values, j[None, :], d[:, None], v_token, before, total, begun, D)
            new_k, new_v = pack_loaded(
                own_k, own_v, key_codes, key_scales, value_codes, value_scales, key_order, group, is_kept, D, BITS
            )
            old_k = _tokens(k, old_keys, j[:, None], d[None, :], k_token, before, first, begun, D)
            tl.store(seen_k + rows[:, None] * D + d[None, :], tl.where(is_sink[:, None], old_k, new_k.to(old_k.dtype)))
            old_v = _tokens(v, old_values, j[None, :], d[:, None], v_token, before, first, begun, D)
            tl.store(seen_v + rows[None, :] * D + d[:, None], tl.where(is_sink[None, :], old_v, new_v.to(old_v.dtype)))


@triton.jit(do_not_specialize=["T", "window", "limit", "held", "places"])
def prompt_attention_kernel(
    q, k, v, seen_k, seen_v, old_keys, old_values, old_lengths, starts, o, lse, T, window, limit, held, places, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One program per BM queries and query head: `window.forward` with k, v of a query's own group and of sinks behind
    the window, and seen_k, seen_v [B, places, HK, D] of earlier groups.

    After the tokens of an old cache, of `held` groups, the first query is the next after these, and the groups are
    those from the first that it holds. Its own current group and its sinks are in old_keys and old_values.
    `starts` as in `pack_prompt_kernel`.
    """
    h = tl.program_id(0) % HQ
    c = tl.program_id(0) // HQ
    chunks = (T + BM - 1) // BM
    b = (c // chunks).to(tl.int64)
    position = c % chunks * BM
    head = (h // (HQ // HK)).to(tl.int64)
    flat, seen_at = b * T, b * places
    if starts is None:
        q += b * q_row
        k += b * k_row
        v += b * v_row
    else:
        flat = tl.load(starts + b).to(tl.int64)
        T = (tl.load(starts + b + 1) - flat).to(tl.int32)
        if position >= T:
            return
        seen_at = first_place(b, flat, held)
        q += flat * q_token
        k += flat * k_token
        v += flat * v_token
    q += h.to(tl.int64) * q_head
    k += head * k_head
    v += head * v_head
    seen_k += (seen_at * HK + head) * D
    seen_v += (seen_at * HK + head) * D
    o += (flat * HQ + h) * D
    lse += flat * HQ + h
    before, base = 0, 0
    if old_lengths is not None:  # tokens are counted from the first of the sequence
        before = tl.load(old_lengths + b)
        begun = tl.maximum(before - 1, 0) // GROUP
        base = tl.maximum(begun - held, 0) * GROUP
        shift = before.to(tl.int64)
        q -= shift * q_token
        k -= shift * k_token
        v -= shift * v_token
        o -= shift * (HQ * D)
        lse -= shift * HQ
        seen_k -= base.to(tl.int64) * (HK * D)
        seen_v -= base.to(tl.int64) * (HK * D)
        old_keys += (b * HK + head) * (TOKENS * D)
        old_values += (b * HK + head) * (TOKENS * D)
    position += before
    length = before + T
    end = tl.minimum(position + BM, length)
    packed = (length - 1) // GROUP * GROUP
    d = tl.arange(0, D)
    i = position + tl.arange(0, BM)
    q_MD = load_rows(q, i, q_token, length, d, D)
    factor = scale * LOG2E if CAP is None else scale / CAP
    top = tl.full([BM], HIDDEN, dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    sums = tl.zeros([BM, D], dtype=tl.float32)
    own = i // GROUP * GROUP
    if old_lengths is not None:
        at = (TOKENS - GROUP - begun * GROUP) * D
        for start in tl.range(position // GROUP * GROUP, before, BN, num_stages=1):
            j = start + tl.arange(0, BN)
            seen = in_window(i[:, None], j[None, :], window, EDGE) & (j < before)[None, :]
            seen = seen & (j[None, :] >= own[:, None])
            top, total, sums = attend_tile(
                q_MD, old_keys + at, old_values + at, j, seen, top, total, sums, D, D, before, d, factor, D, CAP,
                PRECISION,
            )  # fmt: skip
    for start in tl.range(tl.maximum(position // GROUP * GROUP, before), end, BN, num_stages=1):
        j = start + tl.arange(0, BN)
        seen = in_window(i[:, None], j[None, :], window, EDGE) & (j[None, :] >= own[:, None])
        top, total, sums = attend_tile(
            q_MD, k, v, j, seen, top, total, sums, k_token, v_token, length, d, factor, D, CAP, PRECISION
        )
    if SINKS > 0:  # ptxas 12.8 crashes on the first of these loops where it never runs
        if old_lengths is not None:
            for start in range(0, tl.minimum(tl.minimum(SINKS, before), end - window), BS):
                j = start + tl.arange(0, BS)
                seen = in_sinks(i[:, None], j[None, :], window, SINKS, EDGE) & (j < before)[None, :]
                seen = seen & (i[:, None] - j[None, :] < limit)
                top, total, sums = attend_tile(
                    q_MD, old_keys, old_values, j, seen, top, total, sums, D, D, tl.minimum(before, SINKS), d, factor,
                    D, CAP, PRECISION,
                )  # fmt: skip
        for start in range(before, tl.minimum(SINKS, end - window), BS):
            j = start + tl.arange(0, BS)
            seen = in_sinks(i[:, None], j[None, :], window, SINKS, EDGE)
            if old_lengths is not None:
                seen = seen & (i[:, None] - j[None, :] < limit)
            top, total, sums = attend_tile(
                q_MD, k, v, j, seen, top, total, sums, k_token, v_token, length, d, factor, D, CAP, PRECISION
            )
    first = tl.maximum(position // EDGE * EDGE - window + 1, base)
    for start in tl.range(first, (end - 1) // GROUP * GROUP, BN, num_stages=STAGES):
        j = start + tl.arange(0, BN)
        seen = in_window(i[:, None], j[None, :], window, EDGE) & (j[None, :] < own[:, None])
        partly = is_partly_seen(start, position, position // GROUP * GROUP, window, BM, BN)
        top, total, sums = attend_tile(
            q_MD, seen_k, seen_v, j, seen, top, total, sums, HK * D, HK * D, packed, d, factor, D, CAP, PRECISION,
            partly,
        )  # fmt: skip
    store_rows(o, i, HQ * D, length, d, D, sums / total[:, None])
    tl.store(lse + i.to(tl.int64) * HQ, top / LOG2E + tl.log(total), mask=i < length)
