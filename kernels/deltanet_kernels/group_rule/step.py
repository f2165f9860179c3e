"""One token beside a state of what has left its window, on CUDA: one kernel.

In 31 of 32 steps a program loads its state and reads it. Where a group leaves, it first restores the group's keys and
values from their codes and writes them, one after the other, into the state in its registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.tiles import L2_EPS, log_decay, write_strength
from deltanet_kernels.common.token_step import turned
from deltanet_kernels.group_rule.calls import GroupStepCall
from deltanet_kernels.packed_cache.kernels import restored_group
from deltanet_kernels.packed_cache.launches import in_pairs
from deltanet_kernels.packed_cache.numbers import GROUP, in_order


@triton.jit
def written_group(
    S, key_codes, key_scales, value_codes, value_scales, g, beta, number, sinks,
    PLACES: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, ORDERED: tl.constexpr,
    PAIRS: tl.constexpr, out: tl.constexpr,
):  # fmt: skip
    """The state S [D, D], in the order of `restored_group`, after the 32 tokens from this number on.

    Codes and scales are those of the group, g and beta the gates of the head that wait.
    """
    r, d = tl.arange(0, GROUP), tl.arange(0, D)
    token = (r // 2 % 4) * (GROUP // 4) + r // 8 * 2 + r % 2
    k_DR = restored_group(key_codes, key_scales, r, GROUP, D, BITS, ORDERED, PAIRS, out).to(tl.float32)
    v_RD = restored_group(value_codes, value_scales, d, D, GROUP, BITS, False, PAIRS, out).to(tl.float32)
    k_DR = k_DR * tl.rsqrt(tl.sum(k_DR * k_DR, axis=0) + L2_EPS)[None, :]
    for t in range(0, GROUP):
        if number + t >= sinks:
            at = (number + t) % PLACES * H
            strength = tl.load(beta + at).to(tl.float32)
            k_D = tl.sum(tl.where(r[None, :] == t, k_DR, 0.0), axis=1)
            v_D = tl.sum(tl.where(token[:, None] == t, v_RD, 0.0), axis=0)
            S = S * tl.exp(tl.load(g + at).to(tl.float32))
            S += k_D[:, None] * (strength * (v_D - tl.sum(k_D[:, None] * S, axis=0)))[None, :]
    return S


@triton.jit
def group_step_kernel(
    q, a, b, A_log, dt_bias, key_codes, key_scales, value_codes, value_scales, lengths, key_order, g, beta, state,
    state_scale, cos, sin, o, sinks, scale, q_row, a_row, b_row,
    N: tl.constexpr, HK: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    R: tl.constexpr, ROPE_ROWS: tl.constexpr, LIMIT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program per row and state, which HEADS query heads read; tokens of q, a and b are x_row elements apart."""
    PLACES: tl.constexpr = 32 * (N + 1)
    pair = tl.program_id(0).to(tl.int64)
    n, h = pair // H, pair % H
    held = n * HK + h // (H // HK)
    number = tl.load(lengths + n)
    d = tl.arange(0, D)
    channels = (d // 2 % 4) * (D // 4) + d // 8 * 2 + d % 2  # in the order of `restored_group`
    if key_order is not None:
        channels = in_order(key_order + held % HK * (2 * D), channels, D)
    at = (pair * D + channels[:, None]) * D + d[None, :]
    S = tl.load(state + at).to(tl.float32)
    if state_scale is not None:
        S = S * tl.load(state_scale + pair * D + channels)[:, None]
    g += n * (PLACES * H) + h
    beta += n * (PLACES * H) + h
    if (number % GROUP == 0) & (number >= PLACES):
        first = number - PLACES
        group = held * N + first // GROUP % N
        codes = group * (GROUP * D * BITS // 8)
        S = written_group(
            S, key_codes + codes, key_scales + group * D, value_codes + codes, value_scales + group * D, g, beta, first,
            sinks, PLACES, H, D, BITS, key_order is not None, PAIRS, q.dtype.element_ty,
        )  # fmt: skip
        if state_scale is not None:
            largest = tl.max(tl.abs(S), axis=1)
            steps = tl.where(largest > 0, tl.div_rn(127.0, largest), 0.0)
            tl.store(state + at, tl.floor(S * steps[:, None] + 0.5).to(tl.int8))
            tl.store(state_scale + pair * D + channels, tl.div_rn(largest, 127.0))
        else:
            tl.store(state + at, S.to(state.dtype.element_ty))
        tl.debug_barrier()  # the group's first gates are read before the token's take their place
    place = number % PLACES * H
    x = tl.load(a + n * a_row + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
    tl.store(g + place, log_decay(x, tl.load(A_log + h)).to(tl.bfloat16))
    tl.store(beta + place, write_strength(tl.load(b + n * b_row + h), LIMIT).to(tl.bfloat16))
    for m in tl.static_range(HEADS):
        head = h * HEADS + m
        q_D = turned(q + n * q_row + head * D, cos, sin, n, channels, channels < D, R, ROPE_ROWS)
        q_D = q_D * (scale * tl.rsqrt(tl.sum(q_D * q_D, axis=0) + L2_EPS))
        tl.store(o + (pair * HEADS + m) * D + d, tl.sum(q_D[:, None] * S, axis=0).to(o.dtype.element_ty))


def _fake_step(call: GroupStepCall):
    return call.q.new_empty(call.q.shape)


@operator(_fake_step, mutates=("g", "beta", "state", "state_scale"))
def group_step_op_(call: GroupStepCall) -> Tensor:
    """o [B, 1, HQ, D]."""
    (B, _, HQ, D), H, cache = call.q.shape, call.state.shape[1], call.cache
    HK, N, bits = cache.keys.shape[1], cache.groups, cache.bits
    o = call.q.new_empty(call.q.shape)
    (q, q_row), (a, a_row), (b, b_row) = rows(call.q), rows(call.a), rows(call.b)
    cos, sin = (None if x is None else x.contiguous() for x in (call.cos, call.sin))
    launch(
        group_step_kernel, B * H, q, a, b, call.A_log, call.dt_bias, *cache[:4], cache.lengths, cache.key_order, call.g,
        call.beta, call.state, call.state_scale, cos, sin, o, call.sinks, call.factor, q_row, a_row, b_row,
        N=N, HK=HK, H=H, HEADS=HQ // H, D=D, BITS=bits, R=0 if cos is None else cos.shape[2],
        ROPE_ROWS=cos is not None and cos.shape[0] > 1, LIMIT=call.limit,
        PAIRS=in_pairs(bits, q),
        num_warps=4 if D <= 64 else 8,
    )  # fmt: skip
    return o


def group_step_triton_(call: GroupStepCall) -> Tensor:
    """`deltanet_kernels.group_gated_delta_step_` in Triton, for checked arguments.

    Raises:
        NotImplementedError: other head sizes than 64 and 128, or a dtype other than float32, bfloat16, float16.
    """
    q = call.q
    if q.shape[3] not in (64, 128) or q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"heads of {q.shape[3]} in {q.dtype}: the kernel takes 64 and 128, in up to 32 bits")
    return group_step_op_(call)
