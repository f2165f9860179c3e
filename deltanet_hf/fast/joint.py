"""Linear layers with one input as one matrix product.

Decoding is many small launches, and a layer's projections of its input are most of them. The parameters of such layers
are moved into one block of memory, of which each stays a view: modules, names, values, gradients and saved files are as
before, and no memory is added.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT = 8  # numbers of outputs that matrix products are fast for are multiples of it


class JointProjection:
    """The outputs of several linear layers with one input, as one product where they can be.

    They stay apart, and `weight` is None, if one of them is another module than `nn.Linear`, where dtypes or devices
    differ, and where they do not lie in one block: parameters are only moved if they `may_move`, share their memory
    with no other tensor and have no gradient, because CUDA graphs of training may hold their addresses.
    """

    def __init__(self, linears: Sequence[Any], may_move: bool) -> None:
        self._linears = linears
        self.weight = self._bias = None
        weights: list[Any] = [getattr(one, "weight", None) for one in linears]
        biases: list[Any] = [getattr(one, "bias", None) for one in linears]
        alike = len({(one.dtype, one.device) for one in (*weights, *biases) if one is not None}) == 1
        if len(linears) < 2 or any(type(one) is not nn.Linear for one in linears) or not alike:
            return
        sizes = [len(one) for one in weights]
        weight = _block(weights, sizes, may_move)
        biased = weight is not None and any(one is not None for one in biases)
        bias = _block(biases, sizes, may_move) if biased else None
        if weight is not None and (bias is not None) == biased:
            self.weight, self._bias, self._sizes = weight, bias, [*sizes, len(weight) - sum(sizes)]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs [..., out] for x [..., in], in order; of one product they are views that no other caller gets."""
        if self.weight is None:
            return [linear(x) for linear in self._linears]
        return torch.split_with_sizes(F.linear(x, self.weight, self._bias), self._sizes, -1)[: len(self._linears)]


@torch.inference_mode(False)
@torch.no_grad()
def _block(parameters: Sequence[Any], sizes: Sequence[int], may_move: bool) -> Tensor | None:
    """The block with the rows of these parameters, each None for as many rows of zeros; None if they cannot be moved.

    Its number of rows is a multiple of ALIGNMENT.
    """
    rows = -(-sum(sizes) // ALIGNMENT) * ALIGNMENT
    starts = itertools.accumulate(sizes, initial=0)
    present = [(one, start) for one, start in zip(parameters, starts, strict=False) if one is not None]
    first = present[0][0]
    if any(one.shape[1:] != first.shape[1:] or not one.is_contiguous() for one, _ in present):
        return None
    width = first[0].numel()
    storage = first.untyped_storage()
    if storage.nbytes() == rows * width * first.element_size() and all(
        one.untyped_storage().data_ptr() == storage.data_ptr() and one.storage_offset() == start * width
        for one, start in present
    ):
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), 0)  # moved before
    if not may_move or not all(_is_alone(one) for one, _ in present):
        return None
    block = first.new_zeros(rows, *first.shape[1:])
    for one, start in present:
        place = block[start : start + len(one)]
        place.copy_(one)
        one.data = place
    return block


def _is_alone(parameter: Tensor) -> bool:
    return parameter.grad is None and parameter.untyped_storage().nbytes() == parameter.nbytes
