"""The device, precision and processes of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.fsdp import fully_shard

from deltanet_hf.errors import UserError
from deltanet_recipes.schema_sections import Engine

T = TypeVar("T")
# The other processes wait while the main one tokenises a corpus or writes to a slow disk; NCCL would wait 10 minutes.
LONGEST_WAIT = timedelta(hours=2)


class Runtime:
    """This process's rank among all processes (by accelerate) and the numeric settings of the run.

    Raises UserError if the settings do not fit the machine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        cpu = engine.device == "cpu"
        if engine.device == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device: is cuda, but torch finds no GPU; set it to auto or cpu")
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        self._state = PartialState(cpu=cpu, timeout=LONGEST_WAIT)
        self.device: torch.device = self._state.device
        self.rank, self.world = self._state.process_index, self._state.num_processes
        cuda = self.device.type == "cuda"
        if engine.sharding == "fsdp2" and self.world == 1:
            raise UserError(
                "engine.sharding: fsdp2 works with several processes only; start them by `accelerate launch`"
            )
        self.bf16 = engine.precision == "bf16" or (engine.precision == "auto" and cuda)
        self.compute_dtype = torch.bfloat16 if self.bf16 else torch.float32
        self.compile = cuda if engine.compile is None else engine.compile
        unsharded = cuda and engine.sharding == "none"
        self.cuda_graphs = (unsharded and self.compile) if engine.cuda_graphs is None else engine.cuda_graphs
        if self.cuda_graphs and not unsharded:
            raise UserError("engine.cuda_graphs: works only on GPUs with sharding: none; leave the key out")
        if cuda:
            torch.set_float32_matmul_precision("high")

    @property
    def main(self) -> bool:
        return bool(self._state.is_main_process)

    def barrier(self) -> None:
        self._state.wait_for_everyone()

    def from_main(self, value: T) -> T:
        """The main process's value, on every process."""
        if self.world == 1:
            return value
        values: list[T] = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def autocast(self) -> AbstractContextManager[Any]:
        """A context for bf16 arithmetic on fp32 weights.

        With CUDA graphs, casts of weights are not cached, because each replay has to repeat them.
        """
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=not self.cuda_graphs)

    def shard(self, root: nn.Module, units: list[nn.Module], teacher: nn.Module | None) -> None:
        """With `sharding: fsdp2`, shard each unit (a decoder layer, a mixer) by itself and the rest with the root.

        The teacher's embeddings are not sharded, because their dtype differs from the student's.
        """
        if self.engine.sharding != "fsdp2":
            return
        for unit in units:
            fully_shard(unit)
        inside = {p for unit in units for p in unit.parameters()}
        ignored = set() if teacher is None else set(teacher.parameters()) - inside
        fully_shard(root, reshard_after_forward=False, ignored_params=ignored)

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients over processes: one flat all-reduce if the model is replicated.

        If it is sharded, FSDP2 has averaged them in the backward pass; they are multiplied back to sums.
        """
        if self.world == 1:
            return
        if self.engine.sharding == "fsdp2":
            for p in parameters:  # each process's loss is its share of one sum
                if p.grad is not None:
                    p.grad.mul_(self.world)
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        pieces = [piece.view_as(p) for p, piece in zip(parameters, flat.split([g.numel() for g in grads]), strict=True)]
        torch._foreach_copy_(grads, pieces)  # in place, because a CUDA graph writes to these tensors
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The values summed over processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def peak_memory(self) -> float:
        """Peak memory of this process in GiB: allocated on the GPU, or resident on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
