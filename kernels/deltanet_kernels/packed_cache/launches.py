"""Launches the kernels on a packed cache and registers the operators."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels.common.config import product_precision
from deltanet_kernels.common.device import capability, multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.online_softmax import COMBINED, combine_kernel
from deltanet_kernels.common.registration import cached, differentiable_call, operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.common.state_indices import row_size
from deltanet_kernels.common.token_step import COUNT_BITS, MAX_PROGRAMS
from deltanet_kernels.flash_decoding.config import MAX_GROUP
from deltanet_kernels.packed_cache.calls import (
    EVERYTHING,
    PackedAttentionCall,
    PackedPartCall,
    PackedStepCall,
    PackGroupsCall,
    PackPromptCall,
    PromptAttentionCall,
    RoundTokensCall,
)
from deltanet_kernels.packed_cache.kernels import (
    Places,
    append_kernel,
    pack_kernel,
    packed_span_kernel,
    round_tokens_kernel,
)
from deltanet_kernels.packed_cache.layout import BLOCK, GROUP, SINKS, PackedKeyValues, tokens_of
from deltanet_kernels.packed_cache.prompt import pack_prompt_kernel, prompt_attention_kernel
from deltanet_kernels.window.attention import Kept, OtherForm, Upstream, reach_within, strided, window_backward
from deltanet_kernels.window.calls import WindowCall
from deltanet_kernels.window.config import window_config

NONE_BEFORE = -1  # groups of an old cache: no places in front of a sequence's own (`first_place`)
PROGRAMS = 12  # per multiprocessor
LEAST_SPAN = {64: 1, 128: 2, 256: 2}  # groups, by head size
MOST_SPAN = 12  # groups


@cached
def packed_config(D: int, dtype: torch.dtype) -> tuple[int, int]:
    """Warps and pipeline stages of the attention: a warp for 64 channels, whose numbers fit its registers.

    Of 4 bits on an H100, 16 x 16,384 tokens and 8 key heads of 128 take 276 us with two warps, 285 with one, 440 with
    four; three stages win or lose less than 2% beside two. 256 channels and 8 bits follow by their registers.
    """
    return (4 if dtype == torch.float32 else D // 64), 3


def in_pairs(bits: int, q: Tensor) -> bool:
    """Whether numbers are restored two at a time, by instructions on pairs of bfloat16."""
    return bits == 4 and q.dtype == torch.bfloat16 and capability(q.device) >= (8, 0)


def span_of(groups: int, pairs: int, D: int, device: torch.device) -> int:
    """Groups per program, for `groups` groups of each of `pairs` pairs of a row and a key head.

    Of heads of 128 on an H100: 1 x 2,048 tokens take 10.9, 9.0 and 10.1 us with spans of 1, 2 and 4 groups, 16 x 2,048
    take 48.0, 45.9 and 52.2 with 4, 6 and 8, and 16 x 16,384 take 276, 287 and 289 with 12, 18 and 47.
    """
    wanted = cdiv(groups * pairs, PROGRAMS * multiprocessors(device))
    return min(MOST_SPAN, max(LEAST_SPAN[D], wanted))


def _supported(D: int, dtype: torch.dtype, group: int = 1) -> None:
    """Raises NotImplementedError; `group` query heads share a key head."""
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per key head: up to {MAX_GROUP}")
    if D not in (64, 128, 256):
        raise NotImplementedError(f"a packed cache with head size {D}: the kernels take 64, 128 and 256")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"a packed cache in {dtype}: the kernels take float32, bfloat16 and float16")


def _fake_attention(call: PackedAttentionCall):
    q = call.q
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator(_fake_attention)
def packed_attention_op(call: PackedAttentionCall) -> tuple[Tensor, Tensor]:
    """Return o [B, HQ, 1, D] and the log-sum-exp of the scores [B, HQ] float32."""
    first_q = None if call.first_q is None else call.first_q.contiguous()
    return _attend(call._replace(q=call.q.contiguous(), first_q=first_q))


def places_of(cache: PackedKeyValues, pages: Tensor | None) -> Places | None:
    """Where the rows of a cache are, with pages as in `PackedStepCall`."""
    if pages is None:
        return None
    alone = pages.shape[1] == pages.stride(0) == 1  # so all lengths of windows share a kernel
    return Places(0 if alone else cache.groups, *map(row_size, (pages, *cache.tensors)))


def span_parts(call: PackedAttentionCall, state_indices: Tensor | None, pages: Tensor | None) -> tuple[Tensor, Tensor]:
    """The attention by spans of the cache, for `combined`: sums [B, HQ, spans, D], maxima and totals [B, HQ, spans, 2].

    The queries are contiguous; indices and pages are as in `PackedStepCall`.
    """
    q, cache, (window, sinks, limit), scale, softcap = call.q, call.cache, call.reach, call.factor, call.softcap
    (B, HQ, _, D), HK, bits = q.shape, cache.keys.shape[1], cache.bits
    N = cache.groups * (1 if pages is None else pages.shape[1])
    warps, stages = packed_config(D, q.dtype)
    span = span_of(N, B * HK, D, q.device)
    spans = 1 + cdiv(N, span)
    parts = torch.empty((B, HQ, spans, D), dtype=torch.float32, device=q.device)
    weights = torch.empty((B, HQ, spans, 2), dtype=torch.float32, device=q.device)
    launch(
        packed_span_kernel, B * HK * spans,
        q, call.first_q, *cache, state_indices, pages, parts, weights,
        scale * math.log2(math.e) if softcap is None else scale / softcap, N, span, spans, window, sinks, limit,
        PLACES=places_of(cache, pages), HK=HK, HEADS=HQ // HK, D=D, BITS=bits, BM=max(16, power_of_two(HQ // HK)),
        CAP=softcap, PAIRS=in_pairs(bits, q), STAGES=stages,
        PRECISION=product_precision("auto", q.dtype), EDGE=call.edge, num_warps=warps,
    )  # fmt: skip
    return parts, weights


def _attend(
    call: PackedAttentionCall, state_indices: Tensor | None = None, pages: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `packed_attention_op`, of contiguous q, with indices and pages as in `PackedStepCall`."""
    q = call.q
    B, HQ, _, D = q.shape
    parts, weights = span_parts(call, state_indices, pages)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, HQ), dtype=torch.float32, device=q.device)
    launch(
        combine_kernel, B * HQ, parts, weights, o, lse, parts.shape[2], D=D, BD=D, BN=COMBINED // D,
        GAPS=pages is not None, num_warps=4,
    )  # fmt: skip
    return o, lse


def packed_attention_triton(call: PackedAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_attention` in Triton.

    Raises:
        NotImplementedError: other head sizes than 64, 128 and 256, more than 32 query heads per key head, or a dtype
            other than float32, bfloat16, float16.
    """
    q = call.q
    _supported(q.shape[3], q.dtype, q.shape[1] // call.cache.keys.shape[1])
    return packed_attention_op(call)


def _fake_step(call: PackedStepCall):
    q = call.q
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


CACHE = ("key_codes", "key_scales", "value_codes", "value_scales", "keys", "values", "token_scales", "lengths")
"""The tensors of a cache that a step changes."""


@operator(_fake_step, mutates=CACHE)
def packed_step_op_(call: PackedStepCall) -> tuple[Tensor, Tensor]:
    """Put k and v [B, 1, HK, D] in place; return o [B, 1, HQ, D] and the log-sum-exp [B, 1, HQ] float32."""
    cache, state_indices, pages = call.cache, call.state_indices, call.packed_rows
    (B, _, HQ, D), HK = call.q.shape, call.k.shape[2]
    turned = call.q.contiguous() if call.cos is None else call.q.new_empty(call.q.shape)
    (q, q_row), (k, k_row), (v, v_row) = rows(call.q), rows(call.k), rows(call.v)
    cos, sin = (None if x is None else x.contiguous() for x in (call.cos, call.sin))
    launch(
        append_kernel, B * HK, *cache, state_indices, pages, q, k, v, cos, sin, turned,
        cache.groups * (1 if pages is None else pages.shape[1]), q_row, k_row, v_row,
        PLACES=places_of(cache, pages), HK=HK, HEADS=HQ // HK, D=D, BITS=cache.bits, BM=power_of_two(HQ // HK, 1),
        R=0 if cos is None else cos.shape[2], ROPE_ROWS=cos is not None and cos.shape[0] > 1, COUNT_BITS=COUNT_BITS,
        num_warps=4,
    )  # fmt: skip
    o, lse = _attend(call._replace(q=turned).attention, state_indices, pages)
    return o.view(B, 1, HQ, D), lse.view(B, 1, HQ)


def check_step_supported(call: PackedStepCall) -> None:
    """Raises NotImplementedError."""
    heads = call.k.shape[2]
    _supported(call.q.shape[3], call.q.dtype, call.q.shape[2] // heads)
    if heads > MAX_PROGRAMS:
        raise NotImplementedError(f"{heads} key heads: the kernel takes up to {MAX_PROGRAMS}")


def packed_step_triton_(call: PackedStepCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_step_` in Triton.

    Raises:
        NotImplementedError: as `packed_attention_triton`, or more than 255 key heads.
    """
    check_step_supported(call)
    return packed_step_op_(call)


def _fake_round(call: RoundTokensCall):
    k, v = call
    return k.new_empty(k.shape), v.new_empty(v.shape)


@operator(_fake_round)
def round_tokens_op(call: RoundTokensCall) -> tuple[Tensor, Tensor]:
    """k and v [B, T, HK, D], rounded and contiguous."""
    rounded: tuple[Tensor, Tensor] = _fake_round(call)
    (k, v), strides = strided(*call)
    B, T, HK, D = k.shape
    some = 2048 // D
    launch(
        round_tokens_kernel, cdiv(B * T * HK, some), k, v, *rounded, T, B * T * HK, *strides, HK=HK, D=D, R=some,
        num_warps=4,
    )  # fmt: skip
    return rounded


_round_tokens = differentiable_call(
    round_tokens_op, lambda upstream, call: upstream, ("k", "v"), RoundTokensCall, without=("k", "v")
)


def round_tokens_triton(call: RoundTokensCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.round_tokens` in Triton.

    Raises:
        NotImplementedError: as `pack_prompt_triton`.
    """
    _supported(call.k.shape[3], call.k.dtype)
    return _round_tokens(call)


def _groups(B, HK, N, D, bits, device):
    """The first four tensors of `PackedKeyValues`, not yet computed."""
    codes, scales = {"dtype": torch.uint8, "device": device}, {"dtype": torch.int16, "device": device}
    return (
        torch.empty((B, HK, N, GROUP, D * bits // 8), **codes),
        torch.empty((B, HK, N, D), **scales),
        torch.empty((B, HK, N, D, GROUP * bits // 8), **codes),
        torch.empty((B, HK, N, D // GROUP, GROUP), **scales),
    )


def _fake_pack(call: PackGroupsCall):
    B, HK, length, D = call.k.shape
    return _groups(B, HK, length // GROUP, D, call.bits, call.k.device)


@operator(_fake_pack)
def pack_groups_op(call: PackGroupsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes and scales of keys and of values [B, HK, N * 32, D]."""
    B, HK, T, D = call.k.shape
    packed: tuple[Tensor, Tensor, Tensor, Tensor] = _fake_pack(call)
    if T:
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in call[:2])
        launch(
            pack_kernel, B * HK * (T // GROUP), k, v, *packed, call.key_order,
            T // GROUP, *k.stride()[:3], *v.stride()[:3], HK=HK, D=D, BITS=call.bits, num_warps=4,
        )  # fmt: skip
    return packed


def pack_groups_triton(call: PackGroupsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`deltanet_kernels.pack_groups` in Triton."""
    _supported(call.k.shape[3], call.k.dtype)
    return pack_groups_op(call)


class Before(NamedTuple):
    """The cache and the tokens before those of a part, and where its sequences are, as in `PackedPartCall`."""

    cache: PackedKeyValues | None
    """None where the sequences begin."""
    tokens: tuple[Tensor | None, Tensor | None]
    """The tokens of the cache that are not packed, of `tokens_of`."""
    starts: Tensor | None
    longest: int


def _before(call: PackPromptCall | PromptAttentionCall) -> Before | None:
    """That of sequences which begin in one row."""
    return None if call.cu_seqlens is None else Before(None, (None, None), call.cu_seqlens, call.longest)


def _empty_prompt(call: PackPromptCall, old: PackedKeyValues | None = None, starts: Tensor | None = None):
    """The results of `_pack_prompt`, not yet computed."""
    (B, T, HK, D), device, groups = call.k.shape, call.k.device, call.groups
    N = (T - 1) // GROUP
    rows, places = B, N * GROUP
    if call.cu_seqlens is not None:
        B, N, places = len(call.cu_seqlens) - 1, (call.longest - 1) // GROUP, T
    groups = N if groups is None else groups
    if old is not None:  # restored numbers begin with those of the old cache and its current group
        B, places = len(old.lengths), (old.groups + cdiv(T, GROUP)) * GROUP
    if old is not None and starts is not None:
        places = B * (old.groups + 1) * GROUP + T
    sizes = (D, D, 4 * D // BLOCK)
    tokens = (torch.empty((B, HK, SINKS + GROUP, size), dtype=torch.uint8, device=device) for size in sizes)
    lengths = torch.empty(B, dtype=torch.int32, device=device)
    new = call.k.new_empty if old is None and call.cu_seqlens is None else call.k.new_zeros  # others fill fewer
    seen = (new(rows, places, HK, D) for _ in range(2))
    return *_groups(B, HK, groups, D, call.bits, device), *tokens, lengths, *seen


@operator(_empty_prompt)
def pack_prompt_op(
    call: PackPromptCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of a cache, and the keys and values that later groups see [B, N * 32, HK, D]."""
    return _pack_prompt(call)


def _pack_prompt(call: PackPromptCall, before: Before | None = None):
    """As `pack_prompt_op`, of a prompt or of a part."""
    old, tokens, starts, longest = before or _before(call) or (None, (None, None), None, 0)
    made = _empty_prompt(call, old, starts)
    (k, v), strides = strided(*call[:2])
    (T, HK, D), groups = k.shape[1:], made[0].shape[2]
    T = T if starts is None else longest
    held, last = NONE_BEFORE, (T - 1) // GROUP
    if old is not None:
        held, last = old.groups, old.groups + cdiv(T, GROUP)
    programs = max(last, groups) + 1
    launch(
        pack_prompt_kernel, len(made[7]) * HK * programs, k, v, *made, call.length, *(old or [None] * 4)[:4], *tokens,
        None if old is None else old.lengths, starts, call.key_order, T, groups, held, last, programs, *strides, HK=HK,
        D=D, BITS=call.bits, num_warps=4,
    )  # fmt: skip
    return made


def pack_prompt_triton(call: PackPromptCall) -> tuple[PackedKeyValues, Tensor, Tensor]:
    """`deltanet_kernels.pack_prompt` in Triton.

    Raises:
        NotImplementedError: other head sizes than 64, 128 and 256, or a dtype other than float32, bfloat16, float16.
    """
    _supported(call.k.shape[3], call.k.dtype)
    *cache, keys, values = pack_prompt_op(call)
    return PackedKeyValues(*cache, call.key_order), keys, values  # type: ignore[call-arg]


def _fake_prompt_attention(call: PromptAttentionCall):
    q = call.q
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(_fake_prompt_attention)
def prompt_attention_op(call: PromptAttentionCall) -> tuple[Tensor, Tensor]:
    """o [B, T, HQ, D] and lse [B, T, HQ]."""
    window, sinks = reach_within(call.window, call.sinks, call.q.shape[1])
    keys, values = call.keys.contiguous(), call.values.contiguous()
    return _prompt_attention(call._replace(keys=keys, values=values, window=window, sinks=sinks))


def _prompt_attention(
    call: PromptAttentionCall, limit: int = EVERYTHING, before: Before | None = None
) -> tuple[Tensor, Tensor]:
    """As `prompt_attention_op`, of contiguous keys and values, in a prompt or in a part."""
    (q, k, v), strides = strided(*call[:3])
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    config = window_config("forward", D, call.sinks, q.dtype)
    o, lse = _fake_prompt_attention(call)
    old, tokens, starts, longest = before or _before(call) or (None, (None, None), None, 0)
    lengths, held = (None, NONE_BEFORE) if old is None else (old.lengths, old.groups)
    if starts is not None:
        B, T = len(starts) - 1, longest
    launch(
        prompt_attention_kernel, B * cdiv(T, config.M) * HQ,
        q, k, v, call.keys, call.values, *tokens, lengths, starts, o, lse, T, call.window, limit, held,
        call.keys.shape[1], call.scale, *strides, HQ=HQ, HK=HK, D=D, SINKS=call.sinks, BM=config.M, BN=config.N,
        BS=config.S, STAGES=config.stages, CAP=call.softcap, PRECISION=product_precision("auto", q.dtype),
        EDGE=call.edge, num_warps=config.warps,
    )  # fmt: skip
    return o, lse


def _backward(upstream: Upstream, call: PromptAttentionCall, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, keys, values, window, sinks, scale, softcap, edge, *_ = call
    other = OtherForm(keys.contiguous(), values.contiguous(), GROUP)
    return window_backward(upstream, WindowCall(q, k, v, window, sinks, scale, None, softcap, edge), kept, other)


_differentiable_prompt_attention = differentiable_call(prompt_attention_op, _backward, ("q", "k", "v"), Upstream, Kept)


def prompt_attention_triton(call: PromptAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.prompt_attention` in Triton.

    Raises:
        NotImplementedError: as `pack_prompt_triton`.
    """
    _supported(call.q.shape[3], call.q.dtype)
    return (_differentiable_prompt_attention if call.cu_seqlens is None else prompt_attention_op)(call)


def _packing(call: PackedPartCall) -> PackPromptCall:
    return PackPromptCall(call.k, call.v, call.cache.bits, call.groups, None, call.cache.key_order)


def _fake_part(call: PackedPartCall):
    q = call.q
    made = _empty_prompt(_packing(call), call.cache, call.cu_seqlens)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32), *made


@operator(_fake_part)
def packed_part_op(
    call: PackedPartCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HQ, D], lse [B, T, HQ], the tensors of the cache after the tokens, and what later groups see."""
    old = call.cache.with_tensors(x.contiguous() for x in call.cache.tensors)
    before = Before(old, tokens_of(old, call.q.dtype), call.cu_seqlens, call.longest)
    *cache, seen_k, seen_v = _pack_prompt(_packing(call), before)
    window, sinks, limit = call.reach
    attention = PromptAttentionCall(
        *call[:3], seen_k, seen_v, window, sinks, call.factor, call.softcap, call.edge
    )  # fmt: skip
    return *_prompt_attention(attention, limit, before), *cache, seen_k, seen_v


def packed_part_triton(call: PackedPartCall) -> tuple[Tensor, Tensor, PackedKeyValues, Tensor, Tensor]:
    """`deltanet_kernels.packed_part` in Triton.

    Raises:
        NotImplementedError: as `pack_prompt_triton`.
    """
    _supported(call.q.shape[3], call.q.dtype)
    o, lse, *cache, keys, values = packed_part_op(call)
    return o, lse, call.cache.with_tensors(cache), keys, values
