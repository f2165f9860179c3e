"""Argument checks of the operators on a packed cache."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.checks import (
    check_length,
    check_rotation,
    check_state_indices,
    refuse_gradients,
    require_float,
    require_shape,
    require_tensor,
)
from deltanet_kernels.packed_cache.calls import (
    PackedAttentionCall,
    PackedPartCall,
    PackedStepCall,
    PackGroupsCall,
    PackPromptCall,
    PromptAttentionCall,
    RoundTokensCall,
)
from deltanet_kernels.packed_cache.layout import GROUP, PACKED_BITS, SINKS, is_packable
from deltanet_kernels.window.calls import WindowCall, check_window_attention


def check_packed_attention(call: PackedAttentionCall) -> None:
    """Raises ValueError or TypeError."""
    _check_attention(call, len(call.cache.keys))
    refuse_gradients("packed_attention", "window_attention", call.q, *call.cache.tensors)


def _check_attention(call: PackedAttentionCall, rows: int) -> None:
    held = call.cache.keys
    _check_order(call.cache.key_order, call.cache.bits, held)
    _check_queries(call.q, (rows, call.q.shape[1], 1, held.shape[3]), 1, "[B, HQ, 1, D] of the cache", call)
    if call.first_q is not None:
        _check_like("first_q", call.first_q, call.q)
        require_shape("first_q", call.first_q, tuple(call.q.shape), "the shape of q")


def _check_queries(
    q: Tensor, shape: tuple[int, ...], heads: int, names: str, call: PackedAttentionCall | PackedPartCall
) -> None:
    """Those of a call, whose dimension `heads` is that of the heads, and what they see."""
    require_float("q", require_tensor("q", q))
    require_shape("q", q, shape, names)
    held = call.cache.keys.shape[1]
    if q.shape[heads] % held:
        raise ValueError(f"q: got {q.shape[heads]} heads, needs a multiple of the {held} heads of the cache")
    window, sinks, _ = call.reach
    if window < 1 or not 0 <= sinks <= SINKS:
        raise ValueError(f"got window={window} and sinks={sinks}, needs window >= 1 and sinks from 0 to {SINKS}")


def check_packed_step(call: PackedStepCall) -> None:
    """Raises ValueError or TypeError."""
    rows, HK, _, D = call.cache.keys.shape
    B = rows if call.state_indices is None else len(call.state_indices)
    check_state_indices(call.state_indices, B, call.q.device, call.cache.keys)
    if call.pages is not None:
        if call.state_indices is None:
            raise ValueError("state_indices: got None, needs the rows of the sequences with pages")
        require_shape("pages", require_tensor("pages", call.pages), (B, call.pages.shape[-1]), "[B, M]")
        check_state_indices(call.pages[:, 0], B, call.q.device, call.cache.key_codes, name="pages")
    for name, x in (("k", call.k), ("v", call.v)):
        _check_like(name, x, call.q)
        require_shape(name, x, (B, 1, HK, D), "[B, 1, HK, D] of the cache")
    check_rotation(call.cos, call.sin, B, 1, D, call.q.device)
    check_rotation(call.turn_cos, call.turn_sin, B, 1, D, call.q.device)
    _check_attention(call.attention, B)
    refuse_gradients("packed_step_", "window_attention", *call[:3], *call.cache.tensors)


def check_round_tokens(call: RoundTokensCall) -> None:
    """Raises ValueError or TypeError."""
    _check_tokens(*call)


def check_pack_groups(call: PackGroupsCall) -> None:
    """Raises ValueError or TypeError."""
    _check_tokens(call.k, call.v)
    _check_bits(call.bits)
    _check_order(call.key_order, call.bits, call.k)
    if call.k.shape[2] % GROUP:
        raise ValueError(f"k: got shape {list(call.k.shape)}, needs [B, HK, N * {GROUP}, D]")


def check_pack_prompt(call: PackPromptCall) -> None:
    """Raises ValueError or TypeError."""
    _check_tokens(call.k, call.v)
    _check_bits(call.bits)
    _check_order(call.key_order, call.bits, call.k.transpose(1, 2))
    if not call.k.shape[1]:
        raise ValueError("k: got no tokens")
    check_length(call.length, call.k)


def check_packed_part(call: PackedPartCall) -> None:
    """Raises ValueError or TypeError."""
    B, HK, _, D = call.cache.keys.shape
    T, rows, names = call.q.shape[1], B, "B, T"
    if call.cu_seqlens is not None:
        require_shape("cu_seqlens", require_tensor("cu_seqlens", call.cu_seqlens), (B + 1,), "[B + 1] of the cache")
        rows, names = 1, "1, T"
        if not 0 < call.longest <= T:
            raise ValueError(f"longest: got {call.longest}, needs the most tokens of a sequence")
    for name, x in (("k", call.k), ("v", call.v)):
        _check_like(name, x, call.q)
        require_shape(name, x, (rows, T, HK, D), f"[{names}, HK, D] of the cache")
    if not T:
        raise ValueError("q: got no tokens")
    _check_queries(call.q, (rows, T, call.q.shape[2], D), 2, f"[{names}, HQ, D] of the cache", call)
    if call.groups < 0:
        raise ValueError(f"groups: got {call.groups}, needs at least 0")
    _check_order(call.cache.key_order, call.cache.bits, call.cache.keys)
    refuse_gradients("packed_part", "window_attention", *call[:3], *call.cache.tensors)


def check_prompt_attention(call: PromptAttentionCall) -> None:
    """Raises ValueError or TypeError."""
    q, k, v, *others, window, sinks, scale, softcap, edge = call
    check_window_attention(WindowCall(q, k, v, window, sinks, scale, None, softcap, edge))
    if sinks > SINKS:
        raise ValueError(f"sinks: got {sinks}, needs at most {SINKS}")
    B, T, HK, D = k.shape
    for name, x in zip(("keys", "values"), others, strict=True):
        require_shape(name, require_tensor(name, x), (B, (T - 1) // GROUP * GROUP, HK, D), "[B, N * 32, HK, D]")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    refuse_gradients("prompt_attention", "window_attention", *others)


def _check_tokens(k: Tensor, v: Tensor) -> None:
    require_float("k", require_tensor("k", k))
    require_shape("v", require_tensor("v", v), tuple(k.shape), "the shape of k")
    if k.dim() != 4 or not is_packable(k.shape[-1]):
        raise ValueError(f"k: got shape {list(k.shape)}, needs four dimensions with D in whole groups of channels")


def _check_bits(bits: int) -> None:
    if bits not in PACKED_BITS:
        raise ValueError(f"bits: got {bits}, needs one of {PACKED_BITS}")


def _check_order(key_order: Tensor | None, bits: int, k: Tensor) -> None:
    """The order of keys like k [B, HK, T, D]."""
    if key_order is None:
        return
    if bits != 4 or k.shape[3] % 8:
        raise ValueError(f"key_order: got one for {bits} bits and D = {k.shape[3]}, needs 4 bits and a multiple of 8")
    require_shape("key_order", require_tensor("key_order", key_order), (k.shape[1], 2, k.shape[3]), "[HK, 2, D]")
    if key_order.dtype != torch.int64:
        raise TypeError(f"key_order: got dtype {key_order.dtype}, needs torch.int64")


def _check_like(name: str, x: Tensor, q: Tensor) -> None:
    require_float(name, require_tensor(name, x))
    if x.dtype != q.dtype:
        raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
