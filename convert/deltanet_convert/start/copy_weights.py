"""Copies projections, biases and learned norms from the teacher's attention to a converted layer.

Under grouped-query attention, query head h reads key/value head h // (n_q / n_kv). A layer that has one key/value head
per query head therefore repeats whole blocks of `head_dim` rows, each block n_q / n_kv times in a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_hf.mixers import Mixer


def expand_heads(rows: Tensor, head_dim: int, times: int) -> Tensor:
    """Repeats each head's block of rows: [heads * head_dim, ...] -> [heads * times * head_dim, ...]."""
    return rows.unflatten(0, (-1, head_dim)).repeat_interleave(times, dim=0).flatten(0, 1)


@torch.no_grad()
def copy_attention(attention: Any, layer: Mixer) -> None:
    """Copies the teacher's q, k, v, o projections and learned q/k norms to `layer`, if it has them."""
    head_dim, kv_heads = layer.head_dim, int(attention.config.num_key_value_heads)
    times = layer.num_states // layer.kv_repeats // kv_heads
    weights, biases = _projections(attention, layer.num_heads * head_dim, kv_heads * head_dim)
    targets = (layer.q_proj, layer.k_proj, layer.v_proj)
    for target, weight, bias, repeat in zip(targets, weights, biases, (1, times, times), strict=True):
        target.weight.copy_(expand_heads(weight, head_dim, repeat))
        if target.bias is not None and bias is not None:
            target.bias.copy_(expand_heads(bias, head_dim, repeat))
    layer.o_proj.weight.copy_(attention.o_proj.weight)
    if layer.o_proj.bias is not None:
        layer.o_proj.bias.copy_(attention.o_proj.bias)
    branch = layer.window_branch
    if branch is not None and branch.learned_sinks is not None:
        branch.learned_sinks.copy_(attention.sinks)
    q_norm: Any = layer.q_norm
    k_norm: Any = layer.k_norm
    if q_norm is not None:
        q_norm.weight.copy_(attention.q_norm.weight)
        all_heads = attention.k_norm.weight.numel() > head_dim  # OLMo normalises all heads together
        k_norm.weight.copy_(expand_heads(attention.k_norm.weight, head_dim, times if all_heads else 1))


def _projections(attention: Any, q_rows: int, kv_rows: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of the q, k and v projections, also where they are one module (phi3)."""
    fused = getattr(attention, "qkv_proj", None)
    if fused is not None:
        sizes = [q_rows, kv_rows, kv_rows]
        biases = [None] * 3 if fused.bias is None else list(fused.bias.split(sizes))
        return list(fused.weight.split(sizes)), biases
    parts = [getattr(attention, f"{name}_proj") for name in "qkv"]
    return [part.weight for part in parts], [part.bias for part in parts]
