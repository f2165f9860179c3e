"""The feed-forward blocks of a family's model by few launches.

A block is down_proj(silu(gate_proj(x)) * up_proj(x)). The two projections of x are one matrix product where their
weights lie one behind the other (`deltanet_hf.decoding.join_projections`), and SiLU and product are one kernel.
Projections that are hooked, adapted or replaced are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.joint_projection import product, products
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
)
"""In transformers; others compute themselves, as those with GELU do."""
ACTIVATIONS = ("SiLU", "SiLUActivation")


def is_known(module: nn.Module) -> bool:
    """Whether a module is a block that is computed here."""
    kind = type(module)
    if kind.__name__ not in CLASSES or not kind.__module__.startswith("transformers.models."):
        return False
    return type(module._modules.get("act_fn")).__name__ in ACTIVATIONS


def mlp_forward(block: Any) -> Callable[[Tensor], Tensor] | None:
    """The forward of a block by few launches; None for any other module."""
    if not is_known(block):
        return None

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.dim() != 3 or not x.numel():
            y: Tensor = type(block).forward(block, x)
            return y
        held = block._modules  # quicker than the attributes of a module
        gate, up = held["gate_proj"], held["up_proj"]
        of = products(x, (gate, up))
        a, b = of[gate], of[up]
        alike = a.shape == b.shape and a.dtype == b.dtype
        between = silu_product.unchecked(SiluProductCall(a, b)) if alike else held["act_fn"](a) * b
        return product(between, held["down_proj"])

    return forward
