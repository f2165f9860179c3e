"""The conversion, streamed: embedding, one decoder layer after the other, output head, check, publish.

Every step ends with a line in the workspace's journal; a resumed run skips what the journal says is done.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.publish import READY, Workspace

from .activations import Activations
from .calibration_text import CalibrationText, read_text, tokenise
from .compare_to_teacher import compare_models
from .conversion_plan import check_disk
from .job import Job, removed_on_error
from .layer_step import LayerStep
from .layer_stream import LayerStream
from .output_files import complete_folder, load_tokenizer, versions
from .storage.safetensors_folder import Checkpoint, read_json
from .storage.shard_writer import ShardWriter

EMBEDDING = "model.embed_tokens.weight"
HEAD = "head"  # the step after the last layer
SOFTMAX_TOLERANCE = 1e-4  # float32 rounding over one attention layer, with a wide margin; wrong wiring gives about 1
Progress = Callable[[int, int, str, dict[str, Any]], None]  # layers done, layers in all, what, figures


def convert(job: Job, progress: Progress) -> dict[str, Any]:
    """Runs a conversion to the end and returns the contents of `conversion.json`.

    Raises:
        UserError: something the user can put right; what was finished stays for `--resume`.
        QualityError: softmax attention with a converted layer's weights is not the teacher's.
    """
    with removed_on_error(job.source, job.out):
        report = _convert(job, progress)
    job.close()
    return report


def _convert(job: Job, progress: Progress) -> dict[str, Any]:
    tokenizer = load_tokenizer(job.teacher.folder)
    text = calibration_text(job, tokenizer)
    workspace = Workspace(job.out)
    if job.options.resume and not workspace.journal.exists() and (finished := _finished(job, text)):
        if workspace.folder.exists():  # killed by the last stroke of tidying up
            workspace.discard()
        return finished
    with workspace.opened(_request(job, text), resume=job.options.resume, overwrite=job.options.overwrite):
        if READY not in workspace.steps:
            try:
                check_disk(job.plan, job.out, _allocated(workspace.folder))
                _Run(job, tokenizer, text, workspace, progress).all_steps()
            except (UserError, QualityError):
                if not workspace.steps:
                    workspace.discard()
                raise
        report = dict(workspace.steps[READY])
        workspace.publish()
    return report


class _Run:
    """The steps, in order."""

    def __init__(
        self, job: Job, tokenizer: Any, text: CalibrationText, workspace: Workspace, progress: Progress
    ) -> None:
        self.job, self.text, self.workspace, self.progress = job, text, workspace, progress
        self.tokenizer = tokenizer
        self.stream = LayerStream(job.teacher)
        self.writer = ShardWriter(workspace.model, job.plan.layout)
        self.count = job.teacher.num_layers

    def all_steps(self) -> None:
        self.writer.prepare()
        self.stream.learn_arguments(self.text.calibration.shape[1])
        activations = self._start()
        options = self.job.options
        step = LayerStep(self.stream, self.job.plan.student, self.job.dtype, options.seed, options.fit_memory)
        for index in range(self.count):
            name = f"layer {index}"
            if name not in self.workspace.steps:
                figures = self._layer(step, index, activations)
                self.progress(index + 1, self.count, name, figures)
        if HEAD not in self.workspace.steps:
            check = self._head(activations)
            self.writer.sync()
            self.workspace.done(HEAD, check)
        self.writer.finish()
        report = self._report(self.workspace.steps[HEAD])
        complete_folder(self.job, self.tokenizer, self.workspace.model, report)
        self.workspace.done(READY, report)

    def _start(self) -> Activations:
        """The activations that the next layer needs: the embedding's, or those the journal has come to."""
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

    def _layer(self, step: LayerStep, index: int, activations: Activations) -> dict[str, Any]:
        layer, figures = step.run(index, activations)
        if figures.get("softmax_error", 0.0) > SOFTMAX_TOLERANCE:
            raise QualityError(
                f"layer {index}: softmax attention with the expanded weights differs from the teacher's by "
                f"{figures['softmax_error']:.2e}; the conversion is wrong, please report it with the "
                "teacher's config"
            )
        for name, tensor in layer.state_dict().items():
            self.writer.write(f"model.layers.{index}.{name}", [tensor])
        step.release(index)
        self.writer.sync()
        activations.save(self.workspace.folder, index + 1)
        self.workspace.done(f"layer {index}", figures)
        Activations.forget(self.workspace.folder, index)
        return figures

    def _head(self, activations: Activations) -> dict[str, Any]:
        for name in self.job.plan.layout.specs:
            if not name.startswith(("model.layers.", EMBEDDING)):
                self._copy(name)
        head = self.stream.load_head()
        self.progress(self.count, self.count, "perplexity", {})
        found = compare_models(head, self.text.held_out, activations.held_out, activations.student, self.job.dtype)
        return dataclasses.asdict(found)

    def _copy(self, name: str) -> None:
        self.writer.write(name, _stored(self.job.teacher.checkpoint, name, self.job.dtype))

    def _report(self, check: dict[str, Any]) -> dict[str, Any]:
        job = self.job
        layers = [{"index": index, **self.workspace.steps[f"layer {index}"]} for index in job.wiring.layers]
        return {
            "teacher": _teacher_facts(job),
            "options": _option_facts(job),
            "text": {
                "source": self.text.source,
                "sha256": self.text.sha256,
                "calibration_tokens": self.text.calibration.numel(),
                "held_out_tokens": self.text.held_out.numel(),
                "sequence_length": self.text.calibration.shape[1],
            },
            "versions": versions(),
            "plan": job.plan.to_json(),
            "layers": layers,
            "inserted_norms": self._inserted_norms(),
            "held_out": check,
        }

    def _inserted_norms(self) -> list[dict[str, Any]]:
        """Figures of the kept layers whose attention is not exactly the teacher's."""
        normed = [layer.index for layer in self.job.plan.layers if layer.normed]
        return [{"index": index, **self.workspace.steps[f"layer {index}"]} for index in normed]


def _stored(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    for block in checkpoint.blocks(name):
        rounded = block.to(dtype)
        if not bool(torch.isfinite(rounded).all()):
            raise UserError(
                f"{checkpoint.entries[name].file}: tensor '{name}' overflows in {dtype}; choose --dtype "
                "bfloat16 or float32"
            )
        yield rounded


def calibration_text(job: Job, tokenizer: Any) -> CalibrationText:
    options = job.options
    needed = 2 * options.calibration_tokens
    if options.text is None:
        documents = [path.read_text(encoding="utf-8") for path in shipped_texts()]
        source = "the text shipped with deltanet-hf"
    else:
        documents, source = read_text(options.text, needed), str(options.text)
    text = tokenise(
        documents,
        tokenizer,
        options.calibration_tokens,
        options.seed,
        source,
        int(job.teacher.config.max_position_embeddings),
    )
    largest = int(max(text.calibration.max(), text.held_out.max()))
    if largest >= job.teacher.config.vocab_size:
        raise UserError(
            f"{job.teacher.folder}: the tokenizer makes token {largest} but vocab_size in config.json is "
            f"{job.teacher.config.vocab_size}; give the tokenizer that belongs to the teacher"
        )
    return text


def _request(job: Job, text: CalibrationText) -> dict[str, Any]:
    """Everything that the result depends on; a resumed run must ask for the same."""
    files = [job.teacher.folder / "config.json", *job.teacher.checkpoint.files()]
    states = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    config = hashlib.sha256(files[0].read_bytes()).hexdigest()
    return {
        "teacher": {
            "name": job.source.name,
            "revision": job.source.revision,
            "config": config,
            "files": states,
        },
        "options": {**job.options.decisive(), "layers": list(job.wiring.layers)},
        "text": {"sha256": text.sha256, "tokens": list(text.calibration.shape)},
        "versions": versions(),
    }


def _finished(job: Job, text: CalibrationText) -> dict[str, Any] | None:
    """The report in OUT when the conversion that is to be resumed has been completed already."""
    file = job.out / "conversion.json"
    if not file.exists():
        return None
    report = read_json(file)
    same = (
        report.get("teacher") == _teacher_facts(job)
        and report.get("options") == _option_facts(job)
        and report.get("text", {}).get("sha256") == text.sha256
    )
    return report if same else None


def _teacher_facts(job: Job) -> dict[str, Any]:
    return {
        "name": job.source.name,
        "revision": job.source.revision,
        "model_type": job.teacher.family.model_type,
        "dtype": str(job.teacher.dtype).removeprefix("torch."),
        "tied_embeddings": job.teacher.tied,
    }


def _option_facts(job: Job) -> dict[str, Any]:
    return {**job.options.decisive(), "layers": job.options.layers, "deltanet": job.wiring.to_dict()}


def _allocated(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
