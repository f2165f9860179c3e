"""Stands for a CUDA graph on any device: captures the operations of a step with their tensors, and runs them again.

As in a graph, every number that Python computed is a constant of the graph, every tensor keeps its address, and
nothing may read a tensor on the host or make one from numbers of the host. So a step that bakes in a position, or that
replaces a tensor of its state instead of writing to it, gives other tokens when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deltanet_hf.decoding.capture import CapturedGraph

READS_HOST = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "unique", "masked_select", "lift_fresh")
LEAVES_MEMORY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class CapturedOperations(TorchDispatchMode):
    """The operations under it, which run as well; `replay` runs them again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in READS_HOST and not (name == "lift_fresh" and args[0].numel() == 0):
            raise RuntimeError(f"{name}: not permitted when stream is capturing")
        output = func(*args, **kwargs)
        if func._schema.is_mutable or not is_view(output, (args, kwargs)):
            self.calls.append((func, args, kwargs, output))
        return output

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, output in self.calls:
            tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
            name = func._schema.name.removeprefix("aten::")
            if name in LEAVES_MEMORY:
                for tensor in tensors:  # whatever was there
                    tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
                continue
            again = [x for x in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for tensor, new in zip(tensors, again, strict=True):
                if tensor.data_ptr() != new.data_ptr():
                    tensor.copy_(new)


def is_view(output: Any, inputs: Any) -> bool:
    """Whether an operation has only looked at the memory of its inputs."""
    known = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)}
    found = [x.untyped_storage().data_ptr() for x in pytree.tree_leaves(output) if isinstance(x, Tensor)]
    return bool(found) and all(address in known for address in found)


class EmulatedCapture:
    """A capture (`deltanet_hf.decoding.capture`) that counts what it does: steps, and prompts apart."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.captured_prefills = self.replayed_prefills = 0

    def __call__(self, step: Callable[[], Tensor], device: torch.device, memory: Any = None) -> CapturedGraph:
        """Captures `step`. A capture computes nothing, so everything that the step changes is put back."""
        operations = CapturedOperations()
        before: dict[int, tuple[Tensor, Tensor]] = {}
        keep = _KeepWritten(before)
        try:
            with keep, operations:
                output = step()
        finally:
            for tensor, value in before.values():
                tensor.copy_(value)
        is_prompt = step.__qualname__.startswith("CapturedPrefill")
        self.captured += not is_prompt
        self.captured_prefills += is_prompt

        def replay() -> None:
            self.replayed += not is_prompt
            self.replayed_prefills += is_prompt
            operations.replay()

        return CapturedGraph(replay, output)


class _KeepWritten(TorchDispatchMode):
    """Keeps what tensors hold before they are written to for the first time."""

    def __init__(self, before: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.before, self._own = before, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        arguments |= kwargs
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            tensor = arguments.get(argument.name)
            if written and isinstance(tensor, Tensor):
                base = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
                self.before.setdefault(tensor.untyped_storage().data_ptr(), (base, base.clone()))
        return func(*args, **kwargs)
