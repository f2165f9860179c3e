"""The parts of a decoder layer by few launches: linear layers with one input, norms with sums, feed-forward blocks.

Decoding is many small launches. Linear layers that read one input are one matrix product: their parameters are moved
into one block of memory, of which each stays a view; modules, names, values, gradients and saved files are as before,
and no memory is added. A family's norm is eight small operations (casts, square, mean, root, products); here it is one
kernel with the same roundings, together with the residual sum before it. By `with_children`, a family's own forward
calls such parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.fast.families import NORM, family_of
from deltanet_hf.mixers.attention.paired_class import paired_class
from deltanet_hf.mixers.layer.parts import ALIGNMENT
from deltanet_kernels import rms_norm, silu_product
from deltanet_kernels.arguments import RMSNormCall, SiluProductCall

Module = TypeVar("Module", bound=nn.Module)


def with_children(module: Module, **children: Any) -> Module:
    """A second module of the same class, with all that `module` has but these children, which may be any callable."""
    made: Module = object.__new__(type(module))
    made.__dict__.update(vars(module), _modules={**module._modules, **children})
    return made


class MergedProjection:
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
        with torch.inference_mode(weights[0].is_inference()):  # that in which they were made
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


class Sum(NamedTuple):
    """x + residual, tensors of one shape: the output of a decoder layer, which the norm after it computes."""

    x: Tensor
    residual: Tensor

    def total(self) -> Tensor:
        return self.residual + self.x


class FastNorm:
    """A norm of a known form by one kernel, without gradients."""

    def __init__(self, norm: Any) -> None:
        family = family_of(type(norm), NORM)
        assert family is not None
        self._norm, self._weight, (self._offset, self._round_first) = norm, norm.weight, family.form
        self._eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)

    def __call__(self, x: Tensor | Sum) -> Tensor:
        """x [..., D] -> [..., D]; of a residual sum too."""
        return self.with_sum(x)[0]

    def with_sum(self, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
        """The normalised x, and x itself, which is the sum where a residual sum is given."""
        x, residual = x if isinstance(x, Sum) else (x, None)
        if self._round_first and x.dtype != self._weight.dtype:  # the product has the wider dtype
            x = x if residual is None else residual + x
            return self._norm(x), x
        if residual is None:
            call = RMSNormCall(x, self._weight, self._eps, self._offset, self._round_first)
            return rms_norm.unchecked(call), x
        total = residual.new_empty(residual.shape)
        call = RMSNormCall(x.contiguous(), self._weight, self._eps, self._offset, self._round_first, residual, total)
        return rms_norm.unchecked(call), total


def fast_norms(attention: nn.Module) -> dict[str, FastNorm]:
    """Those of its norms of q and k that are known, by name."""
    norms = {name: attention._modules.get(name) for name in ("q_norm", "k_norm")}
    return {name: FastNorm(norm) for name, norm in norms.items() if family_of(type(norm), NORM) is not None}


def fronted(front: type, attention: nn.Module, linears: Sequence[Any], may_move: bool) -> Any:
    """A second module with the parts of `attention`, of its class behind `front` (`paired_class`).

    Its known norms of q and k are `fast_norms`, and `merged` gives the outputs of the `linears`; `may_move` as in
    `MergedProjection`. The attention has no hooks, adapters or replaced methods.
    """
    made: Any = with_children(attention, **fast_norms(attention))
    made.__class__ = paired_class(front, type(attention), f"Fast{type(attention).__name__}")
    made.merged = MergedProjection(linears, may_move)
    return made


SILU = ("SiLU", "SiLUActivation")
PART = 65536
"""Tokens that are computed at once: in 8B shapes, the products of 262,144 tokens take 22 GB, and their cache 34."""


def is_known_block(module: nn.Module) -> bool:
    """Whether `FastMLP` computes a module; not if the outputs of its two projections differ in dtype."""
    family = family_of(type(module), "MLP")
    if family is None or not family.plain_mlp:
        return False
    held: Any = module
    alike = type(held.gate_proj) is type(held.up_proj) is nn.Linear
    return alike and held.gate_proj.weight.dtype == held.up_proj.weight.dtype


class FastMLP:
    """A known block: the two projections of x are one matrix product, SiLU and product one kernel."""

    def __init__(self, block: Any, may_move: bool) -> None:
        self._gate_and_up = MergedProjection((block.gate_proj, block.up_proj), may_move)
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
