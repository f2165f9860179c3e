"""The feed-forward blocks of the families, down_proj(act(gate_proj(x)) * up_proj(x)): with SiLU, three launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deltanet_hf.fast.joint import JointProjection
from deltanet_kernels import silu_product
from deltanet_kernels.arguments import SiluProductCall

CLASSES = (
    "LlamaMLP",
    "MistralMLP",
    "Qwen2MLP",
    "Qwen3MLP",
    "Qwen3MoeMLP",
    "GraniteMLP",
    "SmolLM3MLP",
    "Olmo2MLP",
    "Olmo3MLP",
    "Gemma2MLP",
    "Gemma3MLP",
    "Qwen3_5MLP",
)
"""In transformers; others compute themselves."""
SILU = ("SiLU", "SiLUActivation")
PART = 65536
"""Tokens that are computed at once: in 8B shapes, the products of 262,144 tokens take 22 GB, and their cache 34."""


def is_known(module: nn.Module) -> bool:
    """Whether `FastMLP` computes a module; not if the outputs of its two projections differ in dtype."""
    kind = type(module)
    if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers.models."):
        return False
    held: Any = module
    alike = type(held.gate_proj) is type(held.up_proj) is nn.Linear
    return alike and held.gate_proj.weight.dtype == held.up_proj.weight.dtype


class FastMLP:
    """A known block: the two projections of x are one matrix product, SiLU and product one kernel."""

    def __init__(self, block: Any, may_move: bool) -> None:
        self._gate_and_up = JointProjection((block.gate_proj, block.up_proj), may_move)
        self._down, self._act = block.down_proj, block.act_fn
        self._is_silu = type(block.act_fn).__name__ in SILU

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] -> [B, T, hidden]."""
        if x.shape[:-1].numel() <= PART:
            return self._output(x)
        return torch.cat([self._output(part) for part in x.reshape(1, -1, x.shape[-1]).split(PART, 1)], 1).view(x.shape)

    def _output(self, x: Tensor) -> Tensor:
        gate, up = self._gate_and_up(x)
        product = silu_product.unchecked(SiluProductCall(gate, up)) if self._is_silu else self._act(gate) * up
        return self._down(product)  # type: ignore[no-any-return]
