"""Puts a sum off until it is read, so that the norm of a residual sum can compute both in one kernel.

A family's decoder layer adds the output of a block to the residual and hands the sum to the next norm, in the same
layer or in the next one. Under this mode an addition returns memory that nothing has been written to yet. Whichever
PyTorch function comes next has the sum written first; a norm may `take` it instead, and write it itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Sum(NamedTuple):
    """x + residual, which is to be written to `total`."""

    total: Tensor
    x: Tensor
    residual: Tensor

    def write(self) -> None:
        torch.add(self.x, self.residual, out=self.total)


class DeferredSum(TorchFunctionMode):
    """While it is entered, x + y of equal shapes is computed when the next PyTorch function is called, or at the end.

    Sums under gradients are not put off. Everything that reads a tensor, in Python or through a Triton launch, calls a
    PyTorch function first, be it `data_ptr`; compiled code does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._put_off: Sum | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._write()
        if func is torch.Tensor.add and not kwargs and _alike(args) and not torch.is_grad_enabled():
            self._put_off = Sum(torch.empty_like(args[0]), *args)
            return self._put_off.total
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self._write()
        self._put_off = None
        super().__exit__(kind, *error)

    def take(self, total: Tensor) -> Sum | None:
        """The sum, if `total` is one that has not been written: the caller writes it. It has called nothing before."""
        found = self._put_off
        if found is None or found.total is not total:
            return None
        self._put_off = None
        return found

    def _write(self) -> None:
        found, self._put_off = self._put_off, None
        if found is not None:
            found.write()


def _alike(args: tuple[Any, ...]) -> bool:
    """Whether these are two addends of equal shapes, kinds and places."""
    if len(args) != 2:
        return False
    x, y = args
    return (
        type(x) is type(y) is Tensor
        and x.shape == y.shape
        and x.dtype == y.dtype
        and x.device == y.device
        and x.is_floating_point()
        and x.is_contiguous()
        and y.is_contiguous()
    )
