"""A family's softmax attention, alone or under a window: its own forward, with one product for q, k and v.

Kernels for packed keys and values are in `packed.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from deltanet_hf.fast.parts import MergedProjection, fronted, with_children

QKV = ("q_proj", "k_proj", "v_proj")


class FastSoftmax:
    """Comes before the class of an attention that has the projections `QKV` (`paired_class`)."""

    merged: MergedProjection

    @classmethod
    def of(cls, attention: nn.Module, may_move: bool) -> Any:
        """A second attention with the parts of `attention`; `may_move` as in `MergedProjection`."""
        return fronted(cls, attention, [attention.get_submodule(name) for name in QKV], may_move)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the attention's, which projects its input for q, k and v in turn."""
        call = with_children(self, **dict(zip(QKV, _in_turn(self.merged), strict=True)))  # type: ignore[type-var]
        return super(FastSoftmax, call).forward(*args, **kwargs)  # type: ignore[misc]


def _in_turn(merged: MergedProjection) -> list[Callable[[Tensor], Tensor]]:
    """Stand-ins for the layers of a product in one call; the first of them that is called computes all outputs."""
    outputs: dict[int, Tensor] = {}

    def output(index: int, x: Tensor) -> Tensor:
        if not outputs:
            outputs.update(enumerate(merged(x)))
        return outputs.pop(index)

    return [functools.partial(output, index) for index in range(len(QKV))]
