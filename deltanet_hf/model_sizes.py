"""Sizes of a family's layers that some configs do not store, because they follow from the hidden size."""

from __future__ import annotations

from typing import Any


def head_size(config: Any) -> int:
    """D: size of a head of attention."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def mlp_size(config: Any) -> int:
    """Inner size of the feed-forward block; in a mixture of experts, of all the experts that a token uses."""
    one = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    return int(one or 4 * config.hidden_size) * int(getattr(config, "num_experts_per_tok", None) or 1)
