"""All measurements of a report on one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.decoding.served import serve
from deltanet_hf.evaluation.measures.measure import Measured, Settings, Text, measure, repeated
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.measures.speed import SpeedPoint, measure_speed
from deltanet_hf.evaluation.report.material import Material
from deltanet_hf.evaluation.report.model_rows import BYTES_AT
from deltanet_hf.evaluation.tasks.harness import TaskResult
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM

NOTHING = Measured(0, {})
REPEAT = "repeat"


@dataclass
class ModelScores:
    """All scores of one model.

    Attributes:
        tasks: name of an lm-eval task -> result.
        texts: figures of the texts.
        recall: figures of the exact repeat and the probes, and the bytes of 2,048 tokens.
        control: of the teacher only, the figures of the probes without the facts.
        seconds: name of a group of measurements -> duration.
    """

    tasks: dict[str, TaskResult] = field(default_factory=dict)
    texts: Measured = NOTHING
    recall: Measured = NOTHING
    control: Measured = NOTHING
    speed: list[SpeedPoint] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form. A rerun changes only the times: `seconds` and the rates in `speed`."""
        tasks = {
            name: {metric: score.to_dict() for metric, score in result.scores.items()}
            for name, result in self.tasks.items()
        }
        return {
            "bytes": self.recall.bytes,
            "tasks": tasks,
            "texts": {name: _plain(scores) for name, scores in self._texts().items()},
            "recall": _plain(self._recall()),
            "speed": [asdict(point) for point in self.speed],
            "seconds": self.seconds,
        }

    def _texts(self) -> dict[str, dict[str, Score]]:
        """Name of a text -> measure -> score."""
        clusters = self.texts.clusters
        found: dict[str, dict[str, Score]] = {}
        for name in [key.removeprefix("loss_") for key in clusters if key.startswith("loss_")]:
            found[name] = {"perplexity": clusters[f"loss_{name}"].perplexity}
            if f"kl_{name}" in clusters:
                found[name] |= {"kl": clusters[f"kl_{name}"].score, "agreement": clusters[f"top1_{name}"].score}
        return found

    def _recall(self) -> dict[str, Score]:
        """Name of a recall measure -> score."""
        clusters = self.recall.clusters
        found = {f"{REPEAT}_perplexity": clusters[f"loss_{REPEAT}"].perplexity}
        return found | {name: clusters[name].score for name in self.recall.probes}


def _plain(scores: dict[str, Score]) -> dict[str, dict[str, float | None]]:
    return {name: score.to_dict() for name, score in scores.items()}


def measure_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel | None,
    material: Material,
    say: Callable[[str], None],
) -> ModelScores:
    """Measure one model.

    Args:
        teacher: reference of the KL divergence; None for the teacher itself.
        say: receives one line per finished group of measurements.
    """
    result = ModelScores()
    started = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        result.seconds[name] = round(time.perf_counter() - started, 2)
        say(f"{name}: {result.seconds[name]:.1f} s")
        started = time.perf_counter()

    if material.texts:
        texts = {name: Text(windows) for name, windows in material.texts.items()}
        result.texts = measure(model, Settings(texts, teacher))
        lap("texts")
    recall = Settings({REPEAT: repeated(material.repeat)}, None, material.recall, BYTES_AT)
    result.recall = measure(model, recall)
    if teacher is None:
        result.control = measure(model, recall.without_facts())
    lap("recall")
    if material.harness is not None:
        lm = DeltaNetLM(model, tokenizer=tokenizer, batch_size="auto")
        result.tasks = material.harness.run(lm)
        lap("tasks")
    for length in material.speed_lengths:
        result.speed.append(measure_speed(serve(model), length))
    if material.speed_lengths:
        lap("speed")
    return result
