"""Runs one stage: builds its objective, its batches and its evaluation, and trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from deltanet_hf.models.cache_bits import cache_bits_of, use_cache_bits
from deltanet_hf.process_memory import give_back_freed_memory
from deltanet_recipes.data.packing import Rows
from deltanet_recipes.data.prepare import RecipeData
from deltanet_recipes.schema import Align, DistilBase, Recipe, Stage, stage_name, stage_tokens
from deltanet_recipes.training.adapters import MergedAdapters, merge_lora, train_for
from deltanet_recipes.training.feeds import RowFeed
from deltanet_recipes.training.layerwise import LayerwiseAlign
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.losses import (
    Head,
    KlTerms,
    live_chunk,
    relative_squared_error,
    squared_error,
)
from deltanet_recipes.training.microstep import compile_layers
from deltanet_recipes.training.model_pair import (
    decoder_layers,
    gathered_on_cpu,
    load_student,
    load_teacher,
)
from deltanet_recipes.training.objectives import AlignLoss, DistilLoss, Objective
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.trainer import Trainer


@dataclass
class StageRun:
    """A stage of a run with everything it works on.

    Args:
        data: the recipe's, at the position where the stage begins.
        folder: folder of the stage's checkpoints.
        steps_before: optimiser steps of the stages before this one, for the log.
    """

    stage: Stage
    recipe: Recipe
    runtime: Runtime
    student: PreTrainedModel
    data: RecipeData
    logbook: Logbook
    folder: Path
    steps_before: int

    def run(self) -> PreTrainedModel:
        """Train and return the student: unsharded, with merged adapters, its trained weights in float32."""
        self.runtime.begin_stage()
        own_bits = cache_bits_of(self.student)
        use_cache_bits(self.student, 16 if isinstance(self.stage, Align) else self.stage.cache_bits)
        rows = f"{len(self.held_out)} held-out rows of {self.stage.sequence_length:,} tokens"
        self.logbook.say(f"{stage_name(self.stage)}: loads the teacher and measures {rows}")
        train_for(self.student, self.stage, self.recipe.seed)
        if isinstance(self.stage, Align):
            if self.stage.layerwise:
                self._align_layerwise(self.stage)
            else:
                self._align(self.stage)
        else:
            self._distil(self.stage)
        student = self._unsharded()
        merge_lora(student)
        use_cache_bits(student, own_bits)
        give_back_freed_memory(self.runtime.device)
        return student

    @torch.no_grad()
    def _unsharded(self) -> PreTrainedModel:
        """The student; after sharded training, a new copy of it in main memory with the trained weights."""
        if self.recipe.engine.sharding == "none":
            return self.student
        fresh = load_student(self.recipe.student, None if self.runtime.bf16 else torch.float32)
        train_for(fresh, self.stage, self.recipe.seed)
        parameters = dict(fresh.named_parameters())
        for name, parameter in self.student.named_parameters():
            parameters[name].data = gathered_on_cpu(parameter)
        return fresh

    def _teacher(self, device: torch.device) -> nn.Module:
        return nn.Module.to(load_teacher(self.recipe, self.runtime.compute_dtype), device)

    def _align(self, stage: Align) -> None:
        teacher = self._teacher(self.runtime.device)
        error = torch.compile(squared_error, dynamic=False) if self.runtime.compile else squared_error
        checkpointing = self.recipe.engine.gradient_checkpointing
        objective = AlignLoss(teacher, self.student, error, checkpointing).to(self.runtime.device)
        feed = RowFeed(self.data.training, stage, self.runtime, score_all=True)
        with self.runtime.autocast():
            objective.measure_scales(feed.evaluation(self._sample(feed)))
        if self.runtime.compile:
            # Parts of the teacher's layers, so that the hooks that tap its attention stay outside of compiled code.
            parts = [part for layer in decoder_layers(teacher) for part in layer.children()]
            compile_layers([*objective.mixers.values(), *parts])
        self.runtime.shard(objective, [*decoder_layers(teacher), *objective.mixers.values()], teacher)
        self._train(objective, feed, lambda: self._evaluate(objective, feed))
        objective.close()

    @cached_property
    def held_out(self) -> Rows:
        """The rows on which every evaluation is done, whatever the size of the micro-batches."""
        mixture, length = self.data.held_out, self.stage.sequence_length
        rows = max(1, self.recipe.data.holdout_tokens // length) if mixture.streams else 0
        mixture.state = [0] * len(mixture.streams)
        return mixture.take(rows, length)

    def _sample(self, feed: RowFeed) -> Rows:
        """The rows on which constants of the loss are measured: those held out, else the first that will be trained."""
        if len(self.held_out):
            return self.held_out
        beginning = feed.state
        sample = self.data.training.take(self.stage.rows_per_step, self.stage.sequence_length)
        feed.state = beginning
        return sample

    def _align_layerwise(self, stage: Align) -> None:
        teacher = self._teacher(torch.device("cpu"))
        rows = stage_tokens(stage) // stage.sequence_length
        LayerwiseAlign(
            stage_name(stage),
            stage,
            self.recipe.log,
            self.runtime,
            teacher,
            self.student,
            self.data.training.take(rows, stage.sequence_length),
            self.held_out,
            self.logbook,
            self.folder,
            self.steps_before,
        ).run()

    def _distil(self, stage: DistilBase) -> None:
        terms = KlTerms(stage.kl_weight, stage.ce_weight, stage.far_ce_weight)
        teacher = self._teacher(torch.device("cpu"))  # `shard` moves both models to the device
        config: Any = teacher.config
        positions = int(config.max_position_embeddings)
        layers = [*decoder_layers(self.student), *decoder_layers(teacher)]
        chunk_loss = live_chunk(Head.of(self.student), Head.of(teacher), terms)
        hidden_error = relative_squared_error
        adapters = None
        if self.runtime.compile:
            chunk_loss = torch.compile(chunk_loss, dynamic=False)
            hidden_error = torch.compile(hidden_error, dynamic=False)
            if self.recipe.engine.sharding == "none":  # each process has all of the adapters
                adapters = MergedAdapters(self.student)
            compile_layers(layers)
        objective = DistilLoss(
            self.student,
            teacher,
            chunk_loss,
            stage.loss_chunk,
            stage.hidden_weight,
            self.recipe.engine.gradient_checkpointing,
            hidden_error,
            adapters,
            positions if stage.far_ce_weight > 0 else None,
        )
        self.runtime.shard(objective, layers, teacher)
        feed = RowFeed(self.data.training, stage, self.runtime, score_all=False)
        self._train(objective, feed, lambda: self._evaluate(objective, feed))

    def _train(self, objective: Objective, feed: RowFeed, evaluate: Callable[[], dict[str, float]]) -> None:
        trainer = Trainer(
            stage_name(self.stage),
            self.stage,
            self.recipe.log,
            self.runtime,
            objective,
            feed,
            evaluate,
            self.logbook,
            self.folder,
            self.steps_before,
        )
        trainer.run()

    @torch.no_grad()
    def _evaluate(self, objective: Objective, feed: RowFeed) -> dict[str, float]:
        """Averages over the held-out rows: the objective's metrics and loss, the perplexity or the mean layer error."""
        if not len(self.held_out):
            return {}
        totals, scored = None, 0.0
        for batch in feed.evaluation(self.held_out):
            with self.runtime.autocast():
                loss, metrics = objective(batch)
            weighted = torch.cat([metrics, loss.reshape(1)]) * batch.scored
            totals = weighted if totals is None else totals + weighted
            scored += float(batch.scored)
        assert totals is not None
        *means, loss = (totals / scored).tolist()
        values = dict(zip(objective.metric_names, means, strict=True))  # type: ignore[arg-type]
        if "ce" in values:
            values["perplexity"] = math.exp(min(values["ce"], 50.0))
        else:
            values["error"] = sum(values.values()) / len(values)
        return {**values, "loss": loss}
