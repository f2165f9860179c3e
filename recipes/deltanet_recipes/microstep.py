"""Forward and backward of one micro-batch: eagerly, or replayed as one CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deltanet_recipes.objectives import Batch, LayerBatch
from deltanet_recipes.packing import Rows
from deltanet_recipes.runtime import Runtime
from deltanet_recipes.walk import Entry

for _node in (Batch, LayerBatch, Rows, Entry):
    pytree.register_dataclass(_node)


class MicroStep:
    """Adds a micro-batch's gradients to the parameters' `.grad` and returns its metrics.

    With CUDA graphs, the first batch of a shape runs eagerly as warm-up, then the work is recorded once and replayed
    on the batch's contents; a batch of another shape (more packed documents than usual) runs eagerly.

    Args:
        alone: every micro-batch is a whole step. A replay then writes the gradients instead of adding them to zeros.
    """

    def __init__(
        self, runtime: Runtime, objective: nn.Module, parameters: list[nn.Parameter], alone: bool = False
    ) -> None:
        self.runtime, self.objective, self.parameters, self.alone = runtime, objective, parameters, alone
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: list[torch.Tensor] = []
        self._shapes: list[Any] = []
        self._result: torch.Tensor | None = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """[1 + metrics] float32: loss, then the objective's metrics."""
        if not self.runtime.cuda_graphs:
            return self._eager(batch)
        with self.runtime.autocast():
            batch = self.objective.prepare(batch)  # type: ignore[operator]
        leaves, tree = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._graph is None:
            self._record(leaves, tree)
        if [(t.shape, t.dtype) for t in tensors] != self._shapes:
            if self.alone:
                self._zero()
            return self._eager(batch)
        for static, tensor in zip(self._static, tensors, strict=True):
            if static.data_ptr() != tensor.data_ptr():
                static.copy_(tensor)
        assert self._graph is not None
        assert self._result is not None
        self._graph.replay()
        return self._result.clone()

    def begin(self) -> None:
        """Before the first micro-batch of a step: no gradients are left of the step before."""
        if not self.alone or self._graph is None:
            self._zero()

    def _zero(self) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def _eager(self, batch: Any) -> torch.Tensor:
        with self.runtime.autocast():
            loss, metrics = self.objective(batch)
        loss.backward()
        return torch.cat([loss.detach().reshape(1), metrics])

    def _record(self, leaves: list[Any], tree: Any) -> None:
        """Warm up on copies of the batch, then capture. Gradients that are added to are left as they were found."""
        copies: dict[int, torch.Tensor] = {}
        static_leaves = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = copies.setdefault(id(leaf), leaf.detach().clone())
                self._static.append(leaf)
            static_leaves.append(leaf)
        self._shapes = [(t.shape, t.dtype) for t in self._static]
        static = pytree.tree_unflatten(static_leaves, tree)
        before = [
            None if self.alone else torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters
        ]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._eager(static)
        torch.cuda.current_stream().wait_stream(side)
        for p, grad in zip(self.parameters, before, strict=True):
            p.grad = grad
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for events meanwhile, which the default mode forbids in every thread.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = self._eager(static)


def compile_layers(modules: list[nn.Module]) -> None:
    """torch.compile the forward of each module, once (all alike, so the code is compiled once per kind)."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for module in modules:
        if "forward" in vars(module):
            continue
        module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
