"""The kernels of one token beside a state of what has left its window, around the attention in that window.

Where a group leaves, in one of 32 steps, the program of a state restores its keys and values from their codes and
writes them, as a chunk of the rule, into the state in registers. The token's group takes their place afterwards.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import combined
from deltanet_kernels.common.tiles import L2_EPS, log_decay, silu, write_strength
from deltanet_kernels.common.token_step import turned
from deltanet_kernels.gated_delta_rule.solve import inverted
from deltanet_kernels.group_rule.round_state import rounded_rows
from deltanet_kernels.packed_cache.kernels import in_page, next_token, put_token, restored_group
from deltanet_kernels.packed_cache.numbers import GROUP, in_order
from deltanet_kernels.window.mixture import state_share


class Rows(NamedTuple):
    """Elements from a row of a tensor to its next, where sequences have indices: a compile-time constant."""

    LENGTHS: int
    G: int
    BETA: int
    STATE: int
    STATE_SCALE: int


@triton.jit
def written_group(
    S, key_codes, key_scales, value_codes, value_scales, g, beta, number, sinks, places,
    H: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr,
    PAIRS: tl.constexpr, out: tl.constexpr,
):  # fmt: skip
    """The state S [D, D], in the order of `restored_group`, after the 32 tokens from this number on, as one chunk.

    Codes and scales are those of the group, g and beta the gates of the head that wait.
    """
    r, d = tl.arange(0, GROUP), tl.arange(0, D)
    token = (r // 2 % 4) * (GROUP // 4) + r // 8 * 2 + r % 2  # in the order that the values have
    k_DR = restored_group(key_codes, key_scales, token, GROUP, D, BITS, ORDERED, PAIRS, out).to(tl.float32)
    v_RD = restored_group(value_codes, value_scales, d, D, GROUP, BITS, False, PAIRS, out).to(tl.float32)
    k_DR = k_DR * tl.rsqrt(tl.sum(k_DR * k_DR, axis=0) + L2_EPS)[None, :]
    k_RD = tl.trans(k_DR)
    writes = number + token >= sinks
    at = (number + token) % places * H
    g_R = tl.where(writes, tl.load(g + at).to(tl.float32), 0.0)
    strength = tl.where(writes, tl.load(beta + at).to(tl.float32), 0.0)
    i, j = token[:, None], token[None, :]
    decay = tl.sum(tl.where(j <= i, g_R[None, :], 0.0), axis=1)  # of what a token finds
    total = tl.sum(g_R)
    KK = tl.dot(k_RD, k_DR, input_precision="tf32x3")
    between = tl.where(j < i, decay[:, None] - decay[None, :], 0.0)
    L = tl.where(j < i, strength[:, None] * tl.exp(between) * KK, 0.0)
    found = tl.dot(k_RD, S, input_precision="tf32x3") * tl.exp(decay)[:, None]
    new = tl.dot(inverted(L, i, j, 5, "tf32x3"), strength[:, None] * (v_RD - found), input_precision="tf32x3")
    return tl.dot(k_DR * tl.exp(total - decay)[None, :], new, S * tl.exp(total), input_precision="tf32x3")


@triton.jit
def _unit(q, scale):
    """q [D] of length `scale`."""
    return q * (scale * tl.rsqrt(tl.sum(q * q, axis=0) + L2_EPS))


@triton.jit(do_not_specialize=["groups", "sinks"])
def group_write_kernel(
    key_codes, key_scales, value_codes, value_scales, lengths, key_order, state_indices, q, cos, sin, g, beta, state,
    state_scale, read, groups, sinks, scale, q_row,
    PLACES: tl.constexpr, ROWS: tl.constexpr, HK: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program per row and state: if a group leaves with the token, writes it into the state.

    What the token reads then goes to read [B, HQ, D] float32, before the state is rounded. Tokens of q are q_row
    elements apart; the rest is as in `put_token`.
    """
    TIMES: tl.constexpr = HEADS * HK // H  # query heads per state
    r = tl.program_id(0).to(tl.int64)
    n, own = r // H, r % H
    h = own // (H // HK)
    places = GROUP * (groups + 1)  # of the gates that wait
    if state_indices is None:
        number = tl.load(lengths + n)  # of the token, from 0
    else:
        row = tl.load(state_indices + n).to(tl.int64)
        number = tl.load(lengths + row * ROWS.LENGTHS)
        number = tl.where(row > 0, number, 0)
        g += row * ROWS.G - n * (places * H)
        beta += row * ROWS.BETA - n * (places * H)
        state += row * ROWS.STATE - n * (H * D * D)
        if state_scale is not None:
            state_scale += row * ROWS.STATE_SCALE - n * (H * D)
    if (number % GROUP != 0) | (number < places):
        return
    d = tl.arange(0, D)
    channels = (d // 2 % 4) * (D // 4) + d // 8 * 2 + d % 2  # in the order of `restored_group`
    if key_order is not None:
        channels = in_order(key_order + h * (2 * D), channels, D)
    first = number - places
    place = first // GROUP % groups
    group = (n * HK + h) * groups + place
    if state_indices is not None:
        key_codes, key_scales, value_codes, value_scales, group = in_page(
            key_codes, key_scales, value_codes, value_scales, state_indices, n, h, place, groups, PLACES
        )
    codes = group * (GROUP * D * BITS // 8)
    rows = r * D + channels
    at = rows[:, None] * D + d[None, :]
    S = tl.load(state + at).to(tl.float32)
    if state_scale is not None:
        S = S * tl.load(state_scale + rows)[:, None]
    gates = n * (places * H) + own
    S = written_group(
        S, key_codes + codes, key_scales + group * D, value_codes + codes, value_scales + group * D, g + gates,
        beta + gates, first, sinks, places, H, D, BITS, key_order is not None, PAIRS, q.dtype.element_ty,
    )  # fmt: skip
    for m in range(0, TIMES):
        head = own * TIMES + m
        q_D = turned(q + n * q_row + head * D, cos, sin, n, channels, channels < D, R, ROPE_ROWS)
        tl.store(read + (n * (H * TIMES) + head) * D + d, tl.sum(_unit(q_D, scale)[:, None] * S, axis=0))
    if state_scale is not None:
        rounded, scale_D = rounded_rows(S)
        tl.store(state + at, rounded)
        tl.store(state_scale + rows, scale_D)
    else:
        tl.store(state + at, S.to(state.dtype.element_ty))


@triton.jit(do_not_specialize=["groups"])
def group_token_kernel(
    key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, lengths, key_order,
    state_indices, q, k, v, cos, sin, turned_q, a, b, A_log, dt_bias, g, beta, groups, q_row, k_row, v_row, a_row,
    b_row,
    PLACES: tl.constexpr, ROWS: tl.constexpr, HK: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, BM: tl.constexpr, R: tl.constexpr, ROPE_ROWS: tl.constexpr, LIMIT: tl.constexpr,
    COUNT_BITS: tl.constexpr,
):  # fmt: skip
    """One program per row and key head: puts the token and its gates.

    Tokens of q, k, v, a and b are x_row elements apart; the rest is as in `put_token`.
    """
    places = GROUP * (groups + 1)  # of the gates that wait
    pair = tl.program_id(0).to(tl.int64)
    n, h = pair // HK, pair % HK
    number, row, keys, values, token_scales = next_token(
        keys, values, token_scales, lengths, state_indices, n, PLACES, HK, D, COUNT_BITS
    )
    g += n * (places * H) if ROWS is None else row * ROWS.G
    beta += n * (places * H) if ROWS is None else row * ROWS.BETA
    for i in tl.static_range(H // HK):
        own = h * (H // HK) + i
        x = tl.load(a + n * a_row + own).to(tl.float32) + tl.load(dt_bias + own).to(tl.float32)
        place = number % places * H + own
        tl.store(g + place, log_decay(x, tl.load(A_log + own)).to(tl.bfloat16))
        tl.store(beta + place, write_strength(tl.load(b + n * b_row + own), LIMIT).to(tl.bfloat16))
    put_token(
        number, key_codes, key_scales, value_codes, value_scales, keys, values, token_scales, key_order, state_indices,
        q, k, v, cos, sin, turned_q, groups, q_row, k_row, v_row, pair, n, h, PLACES, HEADS, D, BITS, BM, R, ROPE_ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["spans", "places"])
def group_mix_kernel(
    parts, weights, q, lengths, state_indices, state, state_scale, read, share_logit, far_slope, near_slope, z,
    norm_weight, o, spans, places, scale, eps, s_row, z_row,
    ROWS: tl.constexpr, HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, WEIGHTS: tl.constexpr,
    REACH: tl.constexpr,
):  # fmt: skip
    """One program per row and query head: mixes what its q [B, HQ, D] got from the window with what it reads.

    parts, weights and spans are as in `combine_kernel`, the mixture as in `mixture_kernel`; lengths hold the token.
    """
    r = tl.program_id(0).to(tl.int64)
    n, head = r // HQ, r % HQ
    row = (n * H + head // (HQ // H)) * D
    if state_indices is not None:  # row n is that of the index
        state_index = tl.load(state_indices + n).to(tl.int64)
        lengths += state_index * ROWS.LENGTHS - n
        state += state_index * ROWS.STATE - n * (H * D * D)
        if state_scale is not None:
            state_scale += state_index * ROWS.STATE_SCALE - n * (H * D)
    d = tl.arange(0, D)
    # All loads are under way before the first result is waited for.
    S = tl.load(state + (row + d[:, None]) * D + d[None, :])
    q_D, read_D = tl.load(q + r * D + d).to(tl.float32), tl.load(read + r * D + d)
    number = tl.load(lengths + n)  # from 1
    logit, far, near = tl.load(share_logit + n * s_row + head), tl.load(far_slope + head), tl.load(near_slope + head)
    if state_scale is not None:
        scale_D = tl.load(state_scale + row + d)
    if WEIGHTS > 0:
        w_D = tl.load(norm_weight + head % WEIGHTS * D + d).to(tl.float32)
    if z is not None:
        z_D = tl.load(z + n * z_row + head * D + d).to(tl.float32)
    if state_indices is not None:
        number = tl.where(state_index > 0, number, 1)
    window_D, lse = combined(parts, weights, r, spans, D, D, BN, state_indices is not None)
    q_D = _unit(q_D, scale)
    if state_scale is not None:
        q_D = q_D * scale_D
    left = (number % GROUP == 1) & (number > places)  # a group, before this token
    f_D = tl.where(left, read_D, tl.sum(q_D[:, None] * S.to(tl.float32), axis=0))
    if WEIGHTS > 0:
        f_D = f_D * tl.rsqrt(tl.sum(f_D * f_D, axis=0) / D + eps) * w_D
    if z is not None:
        f_D = f_D * silu(z_D)
    share = state_share(logit, far, near, lse, number, places, REACH, GROUP)
    tl.store(o + r * D + d, (window_D + share * (f_D - window_D)).to(o.dtype.element_ty))
