"""A gate between full and windowed output for each key/value head, to take derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def blended(o_proj: nn.Module, gates: Tensor, attention: Callable[[Tensor], Any], kv_heads: int) -> Any:
    """The output of attention whose heads are near + gate * (full - near), blended before the output projection.

    The attention runs twice; the input of its output projection is taken from the first run and replaced in the second.

    Args:
        gates: [H * D], a value per channel of the projection's input.
        attention: runs the family's attention; its argument [KV] bool says which heads are unrestricted.
    """
    seen: list[Tensor] = []

    def take(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    def blend(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        near, full = seen[0], inputs[0]
        return (near + gates.to(near.dtype) * (full - near),)

    handle = o_proj.register_forward_pre_hook(take)
    try:
        attention(torch.zeros(kv_heads, dtype=torch.bool))
    finally:
        handle.remove()
    handle = o_proj.register_forward_pre_hook(blend)
    try:
        return attention(torch.ones(kv_heads, dtype=torch.bool))
    finally:
        handle.remove()
