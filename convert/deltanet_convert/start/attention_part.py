"""The teacher's attention for the heads of one branch of a layer with mixed heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deltanet_hf.mixers.head_split import narrow_attention, narrow_weights
from deltanet_hf.mixers.mixed_heads import MixedHeads


def attention_part(attention: Any, layer: MixedHeads, kind: str) -> nn.Module:
    """The part of `attention`, weights included, that the branch `kind` of `layer` replaces; the parts sum to it."""
    branches: dict[Any, list[int]] = {**layer.settings.branches}
    with torch.device("meta"):
        bias = kind == next(iter(branches))
        part = narrow_attention(attention, attention.config, layer.layer_idx, branches[kind], bias)
    part.load_state_dict(narrow_weights(attention, part, branches[kind]), assign=True)
    return part.train(attention.training).requires_grad_(False)
