"""Forward and backward pass of one micro-batch, run eagerly or replayed as one CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deltanet_hf.decoding.capture import CapturedGraph, capture_cuda_graph
from deltanet_hf.process_memory import give_back_freed_memory
from deltanet_recipes.data.packing import Rows
from deltanet_recipes.training.layer_runner import LayerInputs
from deltanet_recipes.training.objectives import Batch, LayerBatch, Objective
from deltanet_recipes.training.runtime import Runtime

for _node in (Batch, LayerBatch, Rows, LayerInputs):
    pytree.register_dataclass(_node)


class MicroStep:
    """Adds the gradients of a micro-batch to the parameters' `.grad` and returns its metrics.

    With CUDA graphs, the first batch runs eagerly as a warm-up; then its work is captured once and replayed on the
    contents of the following batches. A batch of another shape (more packed documents than usual) runs eagerly.

    Args:
        alone: every optimiser step consists of one micro-batch. A replay then writes the gradients instead of adding
            them to zeros.
    """

    def __init__(
        self, runtime: Runtime, objective: Objective, parameters: list[nn.Parameter], alone: bool = False
    ) -> None:
        self.runtime, self.objective, self.parameters, self.alone = runtime, objective, parameters, alone
        self._graph: CapturedGraph | None = None
        self._static: list[torch.Tensor] = []
        self._shapes: list[Any] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        """Returns the loss and the objective's metrics as one tensor [1 + metrics] float32."""
        if not self.runtime.cuda_graphs:
            return self.run_eagerly(batch)
        with self.runtime.autocast():
            batch = self.objective.prepare(batch)
        leaves, tree = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._graph is None:
            self._capture(leaves, tree)
        if [(t.shape, t.dtype) for t in tensors] != self._shapes:
            if self.alone:
                self._zero()
            return self.run_eagerly(batch)
        for static, tensor in zip(self._static, tensors, strict=True):
            if static.data_ptr() != tensor.data_ptr():
                static.copy_(tensor)
        assert self._graph is not None
        self._graph.replay()
        return self._graph.output.clone()

    def begin(self) -> None:
        """Call this before the first micro-batch of a step: it clears the gradients of the step before."""
        if not self.alone or self._graph is None:
            self._zero()

    def _zero(self) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def run_eagerly(self, batch: Any) -> torch.Tensor:
        """As a call, but without CUDA graphs."""
        give_back_freed_memory(self.runtime.device)
        with self.runtime.autocast():
            loss, metrics = self.objective(batch)
        give_back_freed_memory(loss.device)
        loss.backward()
        return torch.cat([loss.detach().reshape(1), metrics])

    def _capture(self, leaves: list[Any], tree: Any) -> None:
        """Warm up on copies of the batch, then capture. Gradients from earlier micro-batches are kept."""
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
                self.run_eagerly(static)
        torch.cuda.current_stream().wait_stream(side)
        for p, grad in zip(self.parameters, before, strict=True):
            p.grad = grad
        self._graph = capture_cuda_graph(lambda: self.run_eagerly(static), self.runtime.device)
        # From here on, `Runtime.peak_memory` adds the graph's own memory, which the capture has counted already.
        torch.cuda.reset_peak_memory_stats()


def compile_layers(modules: list[nn.Module]) -> None:
    """Wrap the forward of each module in torch.compile, once. Layers of one kind share their compiled code.

    The lengths of their windows are arguments of it, so that layers whose windows differ share it too. What was
    compiled before is thrown away: code that meets a second shape is compiled for all shapes, and is slower.
    """
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for module in modules:
        if "forward" in vars(module):
            continue
        module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
