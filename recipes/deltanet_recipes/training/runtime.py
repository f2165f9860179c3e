"""The device, precision and processes of a run."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]  # a dependency of accelerate
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from deltanet_hf.errors import UserError
from deltanet_recipes.schema_sections import Engine
from deltanet_recipes.training.interrupts import Interrupts
from deltanet_recipes.training.peers import end_with_launcher

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
        self._state = PartialState(cpu=cpu, timeout=LONGEST_WAIT)
        self.device: torch.device = self._state.device
        self.rank, self.world = self._state.process_index, self._state.num_processes
        self.interrupts = Interrupts(self.world)
        if self.world > 1:
            end_with_launcher()
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

    def main_first(self) -> AbstractContextManager[None]:
        """A block that the main process runs before the others, which then find what it has written."""
        return self._state.main_process_first()  # type: ignore[no-any-return]

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
        """Move `root` to the device and, with `sharding: fsdp2`, share its parameters among the processes.

        Each unit (a decoder layer, a mixer) is moved and sharded by itself, so that no device ever holds the whole
        model, and then the rest with the root. The teacher's embeddings are not sharded: their dtype may differ from
        the student's.
        """
        if self.engine.sharding != "fsdp2":
            root.to(self.device)
            return
        for unit in units:
            unit.to(self.device)
            fully_shard(unit)
        for p in root.parameters():
            if not isinstance(p, DTensor):
                p.data = p.data.to(self.device)
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)
        inside = {p for unit in units for p in unit.parameters()}
        ignored = set() if teacher is None else set(teacher.parameters()) - inside
        fully_shard(root, reshard_after_forward=False, ignored_params=ignored)

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients over processes: one flat all-reduce if the parameters are replicated.

        If they are sharded, FSDP2 has averaged them in the backward pass; they are multiplied back to sums. With
        `sharding: fsdp2`, parameters of layerwise alignment are replicated.
        """
        if self.world == 1:
            return
        if any(isinstance(p, DTensor) for p in parameters):
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

    def begin_stage(self) -> None:
        """Free what is left of the stage before on the GPU, and measure the peak of the memory anew."""
        gc.collect()  # compiled modules refer to themselves
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def attainable_memory(self) -> int:
        """Bytes of the device's memory that this process has or can get; on a CPU, main memory."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0]) + torch.cuda.memory_reserved(self.device)
        return int(psutil.virtual_memory().available) + int(psutil.Process().memory_info().rss)

    def peak_memory(self) -> float:
        """Peak memory of this process in GiB: on the GPU what is allocated, or resident on a CPU.

        A captured CUDA graph keeps memory for its intermediate results, which counts although torch lists it as free.
        """
        if self.device.type == "cuda":
            segments = torch.cuda.memory_snapshot()
            graphs = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
            kept = sum(s["total_size"] - s["allocated_size"] for s in graphs)
            return (torch.cuda.max_memory_allocated(self.device) + kept) / 2**30
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
