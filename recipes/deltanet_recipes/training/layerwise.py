"""Alignment of one layer after the other, for teachers that do not fit in device memory with their activations.

The hidden states of some tokens are kept on disk. For each layer, the teacher's layer runs over them once, which gives
the inputs and outputs of its attention and the hidden states for the next layer; then the mixer is trained on the
former.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deltanet_hf.safe_write import reserve, writing
from deltanet_recipes.data.packing import Rows
from deltanet_recipes.schema import Align
from deltanet_recipes.schema_sections import Log
from deltanet_recipes.training.checksums import is_intact, load_tensors, save_tensors
from deltanet_recipes.training.feeds import micro_batch_rows, pieces
from deltanet_recipes.training.layer_runner import AttentionTaps, LayerRunner, document_boundaries
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.model_pair import decoder_layers, mixers
from deltanet_recipes.training.objectives import LayerBatch, LayerLoss
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.trainer import Trainer


@dataclass
class _Block:
    """A micro-batch of rows and its activations [R, L, D] at the current layer.

    `tap` holds the arguments of the teacher's attention other than its input.
    """

    rows: Rows
    hidden: torch.Tensor
    attention_input: torch.Tensor
    target: torch.Tensor
    tap: dict[str, Any]
    cu_seqlens: torch.Tensor | None


class LayerwiseAlign:
    """An align stage of mode `layerwise` in one run.

    Args:
        rows: the training rows, whose activations are cached.
        held_out: the rows for evaluation.
        folder: folder of the stage's activations, checkpoints and finished mixers.
        steps_before: optimiser steps of the stages before this one. Each layer does all steps of this stage.
    """

    def __init__(
        self,
        label: str,
        stage: Align,
        log: Log,
        runtime: Runtime,
        teacher: nn.Module,
        student: nn.Module,
        rows: Rows,
        held_out: Rows,
        logbook: Logbook,
        folder: Path,
        steps_before: int,
    ) -> None:
        self.steps_before = steps_before
        self.label, self.stage, self.log, self.runtime = label, stage, log, runtime
        self.teacher, self.student, self.logbook, self.folder = teacher, student, logbook, folder
        self._activations = folder / f"activations-{runtime.rank}"
        with writing(self._activations):
            self._activations.mkdir(parents=True, exist_ok=True)
        self._runner = LayerRunner(teacher)
        size = micro_batch_rows(stage, runtime.world)
        self._blocks = [self._open(f"train-{i}", piece) for i, piece in enumerate(pieces(rows, size))]
        self._held_out = [self._open(f"held-{i}", piece) for i, piece in enumerate(pieces(held_out, size))]

    def run(self) -> None:
        """Train the mixers of all converted layers, from the first to the last."""
        converted = mixers(self.student)
        for index, layer in enumerate(decoder_layers(self.teacher)):
            if index > max(converted):
                break
            layer.to(self.runtime.device)
            for block in (*self._blocks, *self._held_out):
                self._advance(block, layer, index)
            layer.to("cpu")
            if index in converted:
                self.runtime.begin_stage()  # what the trainer of the layer before captured refers to itself
                self.train_mixer(index, converted[index])
                self.steps_before += self.stage.steps
        shutil.rmtree(self._activations)
        self.runtime.barrier()  # the main process deletes the folder next

    def _open(self, name: str, rows: Rows) -> _Block:
        """Embed rows. Their activations are mapped to files, which the operating system pages in and out."""
        with torch.no_grad():
            start = self._runner.embed(rows, document_boundaries(rows.position_ids)).hidden
        files = []
        for part in ("hidden", "input", "target"):
            path = self._activations / f"{name}.{part}"
            reserve(path, start.numel() * start.itemsize)
            stored = torch.from_file(str(path), shared=True, size=start.numel(), dtype=start.dtype)
            files.append(stored.view(start.shape))
        files[0].copy_(start)
        return _Block(rows, files[0], files[1], files[2], {}, None)

    @torch.no_grad()
    def _advance(self, block: _Block, layer: nn.Module, index: int) -> None:
        """Run the teacher's layer over a block, record its attention, and replace `hidden` by its output."""
        block.cu_seqlens = document_boundaries(block.rows.position_ids)
        kwargs = self._runner.embed(block.rows, block.cu_seqlens).kwargs[index]
        taps = AttentionTaps(self.teacher, [index])
        device = self.runtime.device
        kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), kwargs)
        with self.runtime.autocast():
            output = self._runner.run_layer(layer, block.hidden.to(device), kwargs)
        block.hidden.copy_(output)
        block.attention_input.copy_(taps.inputs[index]["hidden_states"])
        block.target.copy_(taps.outputs[index])
        block.tap = {"position_embeddings": taps.inputs[index].get("position_embeddings")}
        taps.remove()

    def train_mixer(self, index: int, mixer: nn.Module) -> None:
        """Train the mixer of a layer on the cached activations, or load it if it was finished before."""
        done = self.folder / f"mixer-{index:03d}.safetensors"
        finished = self.runtime.main and is_intact(done, self.logbook.say, "the layer is trained again")
        if self.runtime.from_main(finished):
            mixer.load_state_dict(load_tensors(done)[0])
            return
        mixer.to(self.runtime.device)
        objective = LayerLoss(mixer, index)
        squares = [block.target.float().square().sum(-1).mean() for block in self._blocks]
        objective.scale.copy_(torch.stack(squares).mean())
        objective.to(self.runtime.device)
        trainer = Trainer(
            f"{self.label}.{index}",
            self.stage,
            self.log,
            self.runtime,
            objective,
            _BlockFeed(self),
            lambda: self._evaluate(objective),
            self.logbook,
            self.folder / f"checkpoints-{index:03d}",
            self.steps_before,
        )
        trainer.run()
        mixer.to("cpu")
        if self.runtime.main:
            save_tensors(done, {name: t.contiguous() for name, t in mixer.state_dict().items()})
        trainer.checkpoints.clear()

    @torch.no_grad()
    def _evaluate(self, objective: LayerLoss) -> dict[str, float]:
        """The relative squared error of the mixer over the held-out rows."""
        if not self._held_out:
            return {}
        error, power = 0.0, 0.0
        with self.runtime.autocast():
            for block in self._held_out:
                batch = self._batch(block, 1.0)
                scaled, _ = objective(batch)
                error += float(scaled * objective.scale)
                power += float(batch.target.float().square().sum())
        return {objective.metric_names[0]: error / power, "error": error / power, "loss": error / power}

    def batches(self, step: int) -> Iterator[LayerBatch]:
        """This process's batches of a step; after the last block comes the first."""
        blocks_per_step = self.stage.rows_per_step // micro_batch_rows(self.stage, self.runtime.world)
        own = blocks_per_step // self.runtime.world
        first = step * blocks_per_step + self.runtime.rank * own
        for place in range(first, first + own):
            yield self._batch(self._blocks[place % len(self._blocks)], float(self.stage.batch_tokens))

    def _batch(self, block: _Block, scored: float) -> LayerBatch:
        device = self.runtime.device
        return LayerBatch(
            tap={"hidden_states": block.attention_input.to(device), **block.tap},
            target=block.target.to(device),
            scored=torch.tensor(scored, device=device),
            cu_seqlens=None if block.cu_seqlens is None else block.cu_seqlens.to(device),
        )


class _BlockFeed:
    """Feeds a layer's training: the blocks in order, repeated. The state is the number of the next step.

    A resumed run may have other blocks: their size depends on the micro-batch and the number of processes.
    """

    def __init__(self, owner: LayerwiseAlign) -> None:
        self.owner, self.state = owner, 0

    def step(self) -> list[LayerBatch]:
        batches = list(self.owner.batches(self.state))
        self.state += 1
        return batches
