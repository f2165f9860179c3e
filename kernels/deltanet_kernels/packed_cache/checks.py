"""Argument checks of the operators on a packed cache."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.checks import (
    check_cu_seqlens,
    check_length,
    check_rotation,
    check_tensors,
    refuse_gradients,
    require_float,
    require_multiple,
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
    sizes = check_tensors(
        call, {"q": "B HQ 1 D", "first_q?": "B HQ 1 D"}, {"B": rows, "D": held.shape[3]}, ("first_q",)
    )
    _check_queries(sizes["HQ"], call)


def _check_queries(heads: int, call: PackedAttentionCall | PackedPartCall) -> None:
    """The number of heads of a call's queries, and what they see."""
    require_multiple("q", heads, "the cache", call.cache.keys.shape[1])
    window, sinks, _ = call.reach
    if window < 1 or not 0 <= sinks <= SINKS:
        raise ValueError(f"got window={window} and sinks={sinks}, needs window >= 1 and sinks from 0 to {SINKS}")


def check_packed_step(call: PackedStepCall) -> None:
    """Raises ValueError or TypeError."""
    rows, HK, _, D = call.cache.keys.shape
    sizes = {"HK": HK, "D": D} | ({"B": rows} if call.state_indices is None else {})
    if call.pages is not None and call.state_indices is None:
        raise ValueError("state_indices: got None, needs the rows of the sequences with pages")
    dims = {"q": "B 1 HQ D", "k": "B 1 HK D", "v": "B 1 HK D", "state_indices?": "B", "pages?": "B M"}
    B = check_tensors(call, dims, sizes, ("k", "v"), dict.fromkeys(("state_indices", "pages"), (torch.int32,)))["B"]
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
    if call.cu_seqlens is not None:
        check_packed_row(call.cu_seqlens, call.longest, call.k)
        if call.length is not None:
            raise ValueError("length: got a tensor beside cu_seqlens, needs None")


def check_packed_row(cu_seqlens: Tensor, longest: int, x: Tensor) -> None:
    """The offsets of sequences in x [1, T, ...], and the most tokens of one; raises ValueError or TypeError."""
    check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1], x.device)
    if not 0 < longest <= x.shape[1]:
        raise ValueError(f"longest: got {longest}, needs the most tokens of a sequence")


def check_packed_part(call: PackedPartCall) -> None:
    """Raises ValueError or TypeError."""
    B, HK, _, D = call.cache.keys.shape
    rows, sizes = "B", {"B": B, "HK": HK, "D": D}
    if call.cu_seqlens is not None:
        rows, sizes["N"] = "1", B + 1
        if not 0 < call.longest <= call.q.shape[1]:
            raise ValueError(f"longest: got {call.longest}, needs the most tokens of a sequence")
    dims = {"q": f"{rows} T HQ D", "k": f"{rows} T HK D", "v": f"{rows} T HK D", "cu_seqlens?": "N"}
    sizes = check_tensors(call, dims, sizes, ("k", "v"), {"cu_seqlens": (torch.int32, torch.int64)})
    _check_queries(sizes["HQ"], call)
    if call.groups < 0:
        raise ValueError(f"groups: got {call.groups}, needs at least 0")
    _check_order(call.cache.key_order, call.cache.bits, call.cache.keys)
    refuse_gradients("packed_part", "window_attention", *call[:3], *call.cache.tensors)


def check_prompt_attention(call: PromptAttentionCall) -> None:
    """Raises ValueError or TypeError."""
    q, k, v, *others, window, sinks, scale, softcap, edge, cu_seqlens, longest = call
    check_window_attention(WindowCall(q, k, v, window, sinks, scale, cu_seqlens, softcap, edge))
    if sinks > SINKS:
        raise ValueError(f"sinks: got {sinks}, needs at most {SINKS}")
    B, T, HK, D = k.shape
    dims = {"k": "B T HK D", "keys": "B S HK D", "values": "B S HK D"}
    sizes = {"B": B, "HK": HK, "D": D, "S": (T - 1) // GROUP * GROUP if cu_seqlens is None else T}
    check_tensors(call, dims, sizes, ("keys", "values"))
    if cu_seqlens is not None:
        check_packed_row(cu_seqlens, longest, q)
        others += q, k, v
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
