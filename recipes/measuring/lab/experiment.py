"""One experiment: a mixer on a task, trained and tested with one seed at one width."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from deltanet_hf.errors import QualityError
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from measuring.lab.presets import Preset
from measuring.lab.tasks import Task
from measuring.lab.tiny_models import NO_POSITIONS, MixerChoice, tiny_model
from measuring.lab.training import Show, TrainSettings, accuracies, train

TEST_TOKENS = 1 << 15  # per length or load
BYTES_AT = 512  # tokens of the sequence whose bytes are given


@dataclass(frozen=True)
class Experiment:
    """The identity of a row of results; everything random depends on `seed`."""

    choice: MixerChoice
    head_dim: int
    seed: int
    width: int
    layers: int
    heads: int
    training: TrainSettings

    def name(self, task: Task) -> str:
        """The row's key, with all settings that may differ; a second experiment of this name replaces the first."""
        size = f"width {self.width} head {self.head_dim} layers {self.layers} heads {self.heads}"
        train = self.training
        run = f"steps {train.steps} rate {train.rate:g} tokens {train.batch_tokens} decay {train.decay:g}"
        return f"{task.name} {self.choice.label} {size} {run} seed {self.seed}"


def row_of(
    experiment: Experiment,
    preset: Preset,
    task: Task,
    device: torch.device,
    show: Show = lambda step, level, accuracy: None,
) -> dict[str, Any]:
    """Train, test, and describe both as a row of the results file.

    The keys are those of the settings and: level (of difficulty that training reached, of `levels`), points and
    accuracy (same order), bytes of a sequence of 512 tokens (see `sequence_bytes`), parameters, seconds. A model that
    diverged has `error` instead of accuracies.
    """
    model: Any = model_of(experiment, preset, task).to(device)
    training = experiment.training
    row = {
        "run": experiment.name(task),
        "task": task.name,
        "mixer": experiment.choice.label,
        "width": experiment.width,
        "layers": experiment.layers,
        "heads": experiment.heads,
        "head_dim": experiment.head_dim,
        "seed": experiment.seed,
        "steps": training.steps,
        "rate": training.rate,
        "batch_tokens": training.batch_tokens,
        "decay": training.decay,
        "trained": task.trained,
        "chance": task.chance,
        "bytes": sequence_bytes(model.eval(), BYTES_AT),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    began = time.perf_counter()
    try:
        level = train(model, task, training, experiment.seed, show)
    except QualityError as error:
        return {**row, "error": str(error)}
    found = accuracies(model, task, experiment.seed, TEST_TOKENS)
    figures: dict[str, Any] = {"level": level + 1, "levels": task.levels}
    figures |= {"points": list(found), "accuracy": [round(value, 5) for value in found.values()]}
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {**row, **figures, "seconds": round(time.perf_counter() - began, 1), "device": device_name}


def model_of(experiment: Experiment, preset: Preset, task: Task) -> Any:
    """The untrained model, on the CPU."""
    table = experiment.choice.table(experiment.layers, {**NO_POSITIONS, **preset.mixer_settings})
    return tiny_model(table, task.vocabulary, experiment.width, experiment.heads, experiment.head_dim, experiment.seed)
