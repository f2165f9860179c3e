"""The kernels of a prompt: a cache of its keys and values with what later groups see of them, and its attention."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.packed_cache.kernels import GROUP, SINKS, pack_group
from deltanet_kernels.window.forward import attend_tile
from deltanet_kernels.window.tiles import HIDDEN, LOG2E, in_sinks, in_window, load_rows, store_rows


@triton.jit(do_not_specialize=["T", "groups"])
def pack_prompt_kernel(
    k, v, key_codes, key_scales, value_codes, value_scales, keys, values, lengths, seen_k, seen_v, length, T, groups,
    k_row, k_token, k_head, v_row, v_token, v_head,
    HK: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and group of 32 tokens; the last one copies the first tokens and the group of the
    last token before `end`.

    A ring of `groups` groups is kept. The restored numbers of all go to seen_k and seen_v [B, N * 32, HK, D].
    """
    last = (T - 1) // GROUP
    end = T if length is None else tl.load(length).to(tl.int32)
    current = (end - 1) // GROUP
    n = tl.program_id(0) % (last + 1)
    pair = (tl.program_id(0) // (last + 1)).to(tl.int64)
    b, h = pair // HK, pair % HK
    k += b * k_row + h * k_head
    v += b * v_row + h * v_head
    r, d = tl.arange(0, GROUP), tl.arange(0, D)
    if n == last:
        e = tl.arange(0, SINKS)
        keys += pair * ((SINKS + GROUP) * D)
        values += pair * ((SINKS + GROUP) * D)
        tl.store(keys + e[:, None] * D + d[None, :], load_rows(k, e, k_token, end, d, D))
        tl.store(values + e[:, None] * D + d[None, :], load_rows(v, e, v_token, end, d, D))
        own = (r + SINKS)[:, None] * D + d[None, :]
        tl.store(keys + own, load_rows(k, current * GROUP + r, k_token, end, d, D))
        tl.store(values + own, load_rows(v, current * GROUP + r, v_token, end, d, D))
        tl.store(lengths + b, end)
    else:
        first = n.to(tl.int64) * GROUP
        group = pair * groups + n % tl.maximum(groups, 1)
        k += first * k_token
        v += first * v_token
        is_kept = n >= current - groups
        if length is not None:
            is_kept = is_kept & (n < current)
        new_k, new_v = pack_group(
            k, v, k_token, v_token, key_codes, key_scales, value_codes, value_scales, group, is_kept, D, BITS
        )
        rows = (b * last * GROUP + first + r) * HK + h
        is_sink = first + r < SINKS
        old_k = tl.load(k + r.to(tl.int64)[:, None] * k_token + d[None, :], mask=is_sink[:, None], other=0.0)
        new_k = tl.where(is_sink[:, None], old_k, new_k.to(old_k.dtype))
        tl.store(seen_k + rows[:, None] * D + d[None, :], new_k)
        old_v = tl.load(v + r.to(tl.int64)[None, :] * v_token + d[:, None], mask=is_sink[None, :], other=0.0)
        new_v = tl.where(is_sink[None, :], old_v, new_v.to(old_v.dtype))
        tl.store(seen_v + rows[None, :] * D + d[:, None], new_v)


@triton.jit(do_not_specialize=["T", "window"])
def prompt_attention_kernel(
    q, k, v, seen_k, seen_v, o, lse, T, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per BM queries and query head: `window.forward` with k, v of a query's own group and of sinks behind
    the window, and seen_k, seen_v [B, N * 32, HK, D] of earlier groups."""
    h = tl.program_id(0) % HQ
    c = tl.program_id(0) // HQ
    chunks = (T + BM - 1) // BM
    b = (c // chunks).to(tl.int64)
    position = c % chunks * BM
    end = tl.minimum(position + BM, T)
    packed = (T - 1) // GROUP * GROUP
    head = (h // (HQ // HK)).to(tl.int64)
    q += b * q_row + h.to(tl.int64) * q_head
    k += b * k_row + head * k_head
    v += b * v_row + head * v_head
    seen_k += (b * packed * HK + head) * D
    seen_v += (b * packed * HK + head) * D
    d = tl.arange(0, D)
    i = position + tl.arange(0, BM)
    q_MD = load_rows(q, i, q_token, T, d, D)
    factor = scale * LOG2E if CAP is None else scale / CAP
    top = tl.full([BM], HIDDEN, dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    sums = tl.zeros([BM, D], dtype=tl.float32)
    own = i // GROUP * GROUP
    for start in tl.range(position // GROUP * GROUP, end, BN, num_stages=1):
        j = start + tl.arange(0, BN)
        seen = in_window(i[:, None], j[None, :], window) & (j[None, :] >= own[:, None])
        top, total, sums = attend_tile(
            q_MD, k, v, j, seen, top, total, sums, k_token, v_token, T, d, factor, D, CAP, PRECISION
        )
    for start in range(0, tl.minimum(SINKS, end - window), BS):
        j = start + tl.arange(0, BS)
        seen = in_sinks(i[:, None], j[None, :], window, SINKS)
        top, total, sums = attend_tile(
            q_MD, k, v, j, seen, top, total, sums, k_token, v_token, T, d, factor, D, CAP, PRECISION
        )
    for start in tl.range(tl.maximum(position - window + 1, 0), (end - 1) // GROUP * GROUP, BN, num_stages=STAGES):
        j = start + tl.arange(0, BN)
        seen = in_window(i[:, None], j[None, :], window) & (j[None, :] < own[:, None])
        top, total, sums = attend_tile(
            q_MD, seen_k, seen_v, j, seen, top, total, sums, HK * D, HK * D, packed, d, factor, D, CAP, PRECISION
        )
    out = (b * T * HQ + h) * D
    store_rows(o + out, i, HQ * D, T, d, D, sums / total[:, None])
    tl.store(lse + b * T * HQ + i.to(tl.int64) * HQ + h, top / LOG2E + tl.log(total), mask=i < T)
