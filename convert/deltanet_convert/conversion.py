"""Runs a conversion: embedding, one decoder layer after the other, output head, check, publication.

Only one decoder layer of the teacher is in memory at a time. Every step ends with a line in the journal of the output
folder (`deltanet_hf.publish`); a resumed run skips the steps that the journal lists.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.process_memory import give_back_freed_memory
from deltanet_hf.publish import Workspace, publish_folder

from .activations import Activations
from .calibration_text import CalibrationText, calibration_text
from .compare_to_teacher import compare_models
from .conversion_record import finished_report, report, request
from .job import Job
from .layer_step import LayerStep, LayerWork
from .layer_stream import Head, LayerStream
from .output_files import write_other_files
from .storage.safetensors_folder import Checkpoint, all_finite
from .storage.shard_writer import ShardWriter
from .teacher_model import EMBEDDING

HEAD = "head"  # the step after the last layer
# Rounding in float32 over one attention layer stays far below this; a wrong wiring gives about 1.
SOFTMAX_TOLERANCE = 1e-4
Progress = Callable[[int, int, str, dict[str, Any]], None]  # finished layers, all layers, name of the step, its figures


def convert(job: Job, out: Path, progress: Progress) -> dict[str, Any]:
    """Runs a conversion to the end, writes it to the folder `out`, and returns the contents of `conversion.json`.

    Raises:
        UserError: something that the user can correct; finished steps are kept for `--resume`.
        QualityError: softmax attention with a converted layer's weights differs from the teacher's.
    """
    teacher, options = job.teacher, job.options
    text = calibration_text(teacher, options.text, options.calibration_tokens, options.seed, job.plan.sequence_length)

    def fill(workspace: Workspace) -> dict[str, Any]:
        check_disk(workspace, job.plan.disk_bytes)
        return _Run(job, text, workspace, progress).all_steps()

    return publish_folder(
        out,
        request(job, text),
        fill,
        resume=options.resume,
        overwrite=options.overwrite,
        finished=lambda: finished_report(job, text, out),
    )


def check_disk(workspace: Workspace, needed: int) -> None:
    """Raises UserError if the disk has too little space for `needed` bytes, less those that are written already."""
    written = sum(file.stat().st_blocks * 512 for file in workspace.folder.rglob("*") if file.is_file())
    free, needed = shutil.disk_usage(workspace.folder).free, needed - written
    if free < needed:
        raise UserError(
            f"{workspace.out}: needs {needed / 1e9:.2f} GB but its disk has {free / 1e9:.2f} GB free; make room or "
            "choose another disk"
        )


class _Run:
    """The steps of one conversion, in order."""

    def __init__(self, job: Job, text: CalibrationText, workspace: Workspace, progress: Progress) -> None:
        self.job, self.text, self.workspace, self.progress = job, text, workspace, progress
        self.stream = LayerStream(job.teacher)
        self.writer = ShardWriter(workspace.model, job.plan.layout)
        self.count = job.teacher.num_layers

    def all_steps(self) -> dict[str, Any]:
        """Writes the complete folder; returns the report."""
        self.writer.prepare()
        self.stream.learn_arguments(self.text.calibration.shape[1])
        activations = self._start()
        options = self.job.options
        step = LayerStep(self.stream, self.job.plan.student, self.job.dtype, options.seed, self.job.device)
        missing = [index for index in range(self.count) if f"layer {index}" not in self.workspace.steps]
        for index in missing:
            work = step.begin(index, activations.calibration)
            if work.changes:
                step.fit(work)
            figures = self._finish(step, work, activations)
            self.progress(index + 1, self.count, f"layer {index}", figures)
        if HEAD not in self.workspace.steps:
            check = self._head(activations)
            self.writer.sync()
            self.workspace.done(HEAD, check)
        self.writer.finish()
        found = report(self.job, self.text, self.workspace.out, self.workspace.steps, self.workspace.steps[HEAD])
        write_other_files(self.job, self.workspace.model, found)
        return found

    def _start(self) -> Activations:
        """The inputs of the next layer: the embedding's output, or the activations that an interrupted run saved."""
        done = sum(f"layer {index}" in self.workspace.steps for index in range(self.count))
        shapes = [(*ids.shape, self.job.teacher.config.hidden_size) for ids in self._batches()]
        if "embedding" in self.workspace.steps:
            self.progress(done, self.count, "resumed", {})
            return Activations.load(self.workspace.folder, done, *shapes)
        calibration, held_out = self.stream.embed(*self._batches())
        (student,) = self.stream.embed(self.text.held_out, rounding=self.job.dtype)
        activations = Activations(calibration, held_out, student)
        self._copy(EMBEDDING)
        self.writer.sync()
        activations.save(self.workspace.folder, 0)
        self.workspace.done("embedding")
        return activations

    def _batches(self) -> tuple[Tensor, Tensor]:
        return self.text.calibration, self.text.held_out

    def _finish(self, step: LayerStep, work: LayerWork, activations: Activations) -> dict[str, Any]:
        """Writes a fitted layer and records it."""
        index = work.index
        layer, figures = step.finish(work, activations)
        if figures.get("softmax_error", 0.0) > SOFTMAX_TOLERANCE:
            raise QualityError(
                f"layer {index}: softmax attention with the expanded weights differs from the teacher's by "
                f"{figures['softmax_error']:.2e}; the conversion is wrong, please report it with the "
                "teacher's config"
            )
        prefix, tensors = f"model.layers.{index}.", layer.state_dict()
        for name in self.job.plan.layout.specs:
            if name.startswith(prefix):
                tensor = tensors.get(name.removeprefix(prefix))
                self._copy(name) if tensor is None else self.writer.write(name, [tensor])
        step.release(index)
        self.writer.sync()
        activations.save(self.workspace.folder, index + 1)
        self.workspace.done(f"layer {index}", figures)
        Activations.forget(self.workspace.folder, index)
        give_back_freed_memory()
        return figures

    def _head(self, activations: Activations) -> dict[str, Any]:
        """Copies the final norm and the output head, and compares both models on the held-out text."""
        for name in self.job.plan.layout.specs:
            if not name.startswith(("model.layers.", EMBEDDING)):
                self._copy(name)
        head = Head(self.stream, self.job.device)
        self.progress(self.count, self.count, "perplexity", {})
        return compare_models(head, self.text.held_out, activations.held_out, activations.student, self.job.dtype)

    def _copy(self, name: str) -> None:
        self.writer.write(name, _rounded_blocks(self.job.teacher.checkpoint, name, self.job.dtype))


def _rounded_blocks(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """A stored tensor's elements in `dtype`, in flat pieces; UserError if one of them overflows."""
    for block in checkpoint.blocks(name):
        rounded = block.to(dtype)
        if not all_finite(rounded):
            raise UserError(
                f"{checkpoint.entries[name].file}: tensor '{name}' overflows in {dtype}; choose --dtype "
                "bfloat16 or float32"
            )
        yield rounded
