"""Linear layers with one input as one matrix product, where their weights lie one behind another in memory.

Decoding is many small launches, and a layer's projections of its input are most of them. `join` moves the parameters of
such layers into one block of memory, of which each stays a view: modules, names, values, gradients and saved files are
as before, and no memory is added. `products` multiplies by a whole block wherever it finds one, and otherwise calls the
layers one by one: layers that were moved, replaced (LoRA), hooked or sharded later are so without being told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT = 8  # numbers of outputs that matrix products are fast for are multiples of it


class Group(NamedTuple):
    """Plain linear layers, their weights, and their biases where they have one."""

    linears: list[nn.Module]
    weights: list[Tensor]
    biases: list[Tensor | None]


def products(x: Tensor, linears: Sequence[nn.Module]) -> dict[nn.Module, Tensor]:
    """The outputs [B, T, out] of linear layers for x [B, T, in], by layer; without gradients they may be views of one.

    Layers with a bias and layers without one make one product.
    """
    found: dict[nn.Module, Tensor] = {}
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        group = _plain(linears)
        weight = _block(group.weights) if len(group.linears) > 1 else None
        bias = None if weight is None else _bias_block(group.biases, group.weights, weight.shape[0])
        if weight is not None and (bias is not None or all(one is None for one in group.biases)):
            sizes = [one.shape[0] for one in group.weights]
            sizes.append(weight.shape[0] - sum(sizes))
            outputs = torch.split_with_sizes(F.linear(x, weight, bias), sizes, -1)
            found = dict(zip(group.linears, outputs, strict=False))
    for one in linears:
        if one not in found:
            found[one] = one(x)
    return found


def product(x: Tensor, linear: nn.Module) -> Tensor:
    """The output of one linear layer; without gradients quicker than its call."""
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and _is_plain(linear):
        held = linear._parameters
        return F.linear(x, held["weight"], held["bias"])  # type: ignore[arg-type]
    y: Tensor = linear(x)
    return y


@torch.inference_mode(False)
@torch.no_grad()
def join(linears: Sequence[nn.Module]) -> None:
    """Move the parameters of linear layers with one input behind one another, for `products`.

    Nothing is moved if one of the layers is replaced or hooked, nor parameters of which one shares its memory with
    another tensor or has a gradient: CUDA graphs of training may hold its address. Where only some of the layers have
    a bias, zeros stand for those of the others.
    """
    group = _plain(linears)
    if not linears or len(group.linears) < len(linears):
        return
    if _block(group.weights) is None and all(_is_alone(one) for one in group.weights):
        _move(group.weights)
    weight, biases = _block(group.weights), [one for one in group.biases if one is not None]
    if weight is None or not biases or _bias_block(group.biases, group.weights, weight.shape[0]) is not None:
        return
    if all(_is_alone(one) and (one.dtype, one.device) == (weight.dtype, weight.device) for one in biases):
        block = weight.new_zeros(len(weight))
        for one, start in _places(group.biases, group.weights):
            place = block[start : start + len(one)]
            place.copy_(one)
            one.data = place
            one.joint_bias = block  # type: ignore[attr-defined]


def _plain(linears: Sequence[nn.Module]) -> Group:
    """The layers that are no more than the product with their parameters."""
    group = Group([], [], [])
    for linear in linears:
        if _is_plain(linear):
            parameters: Any = linear._parameters
            group.linears.append(linear)
            group.weights.append(parameters["weight"])
            group.biases.append(parameters["bias"])
    return group


def _is_plain(linear: nn.Module) -> bool:
    if type(linear) is not nn.Linear:
        return False
    held = linear.__dict__  # quicker than the attributes of a module
    if held["_forward_hooks"] or held["_forward_pre_hooks"] or "forward" in held:
        return False
    return type(held["_parameters"]["weight"]) is nn.Parameter  # not so in a sharded model


def _places(biases: list[Tensor | None], weights: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Each bias, and the row of the joint weight where its layer begins."""
    start = 0
    for bias, weight in zip(biases, weights, strict=True):
        if bias is not None:
            yield bias, start
        start += weight.shape[0]


def _bias_block(biases: list[Tensor | None], weights: list[Tensor], rows: int) -> Tensor | None:
    """The biases as one tensor of so many rows, if `join` has put them into one and they are still there."""
    block: Tensor | None = None
    for bias, start in _places(biases, weights):
        if block is None:
            block = getattr(bias, "joint_bias", None)
            if block is None or block.shape[0] != rows or block.dtype != bias.dtype:
                return None
        if bias.data_ptr() != block.data_ptr() + start * block.element_size():
            return None
    return block


def _block(parameters: list[Tensor]) -> Tensor | None:
    """The weights as one tensor, if they lie behind one another; it may end with rows that mean nothing."""
    if not parameters:
        return None
    first, rows = parameters[0], 0
    strides, dtype, size = first.stride(), first.dtype, first.element_size()
    address, offset, width = first.data_ptr(), first.storage_offset(), strides[0]
    for one in parameters:  # the same distance in addresses and in offsets: in the same memory
        start = rows * width
        if one.data_ptr() != address + start * size or one.storage_offset() != offset + start:
            return None
        if one.stride() != strides or one.dtype != dtype or not one.is_contiguous():
            return None
        rows += one.shape[0]
    whole = _padded(rows)
    if (offset + whole * width) * size > first.untyped_storage().nbytes():
        whole = rows
    return first.as_strided((whole, *first.shape[1:]), strides)


def _is_alone(parameter: Tensor) -> bool:
    return not parameter.is_meta and parameter.grad is None and parameter.untyped_storage().nbytes() == parameter.nbytes


def _move(parameters: list[Tensor]) -> None:
    first = parameters[0]
    alike = {(one.dtype, one.device, one.shape[1:]) for one in parameters}
    if len(alike) > 1:
        return
    sizes = [one.shape[0] for one in parameters]
    block = first.new_zeros(_padded(sum(sizes)), *first.shape[1:])
    for one, place in zip(parameters, block.split([*sizes, block.shape[0] - sum(sizes)]), strict=False):
        place.copy_(one)
        one.data = place


def _padded(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT
