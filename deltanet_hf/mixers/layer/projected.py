"""The result of `Mixer.project`: the outputs of all linear layers that read a layer's input."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Projected(NamedTuple):
    """A layer's input and its projections, each [B, T, ...]; None for what the layer does not have."""

    x: Tensor  # [B, T, hidden], zeros at padding
    q: Tensor  # [B, T, HQ*D], through the learned norm
    k: Tensor  # [B, T, HK*D], through the learned norm
    v: Tensor  # [B, T, HV*D]
    gate: Tensor | None = None  # [B, T, HO, D], logits of the output gate
    a: Tensor | None = None  # [B, T, HV], logits of the decay: of `a_proj`
    b: Tensor | None = None  # [B, T, HV], logits of the write strength: of `b_proj`
    mixing_logits: Tensor | None = None  # [B, T, HQ], of the state's share of the output: the window's `share_proj`
