"""All measurements of a report on one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.decoding.served import serve
from deltanet_hf.evaluation.measures.continuations import exact_match, token_budget
from deltanet_hf.evaluation.measures.probes import Probe, answer_outcomes
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.measures.sequence_bytes import sequence_bytes
from deltanet_hf.evaluation.measures.speed import SpeedPoint, measure_speed
from deltanet_hf.evaluation.measures.text_scores import score_repeat, score_text
from deltanet_hf.evaluation.report.contestants import BYTES_AT
from deltanet_hf.evaluation.report.material import Material
from deltanet_hf.evaluation.tasks.harness import TaskResult
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM


@dataclass
class ModelScores:
    """All scores of one model.

    Attributes:
        tasks: name of an lm-eval task -> result.
        texts: name of a text -> measure -> score.
        recall: name of a recall measure -> score.
        answers: name of a probe -> exact answers per sequence, for comparisons with the teacher.
        control: of the teacher only, the same without the facts.
        bytes: of the cache after 2,048 tokens.
        seconds: name of a group of measurements -> duration.
    """

    tasks: dict[str, TaskResult] = field(default_factory=dict)
    texts: dict[str, dict[str, Score]] = field(default_factory=dict)
    recall: dict[str, Score] = field(default_factory=dict)
    answers: dict[str, Clusters] = field(default_factory=dict)
    control: dict[str, Clusters] = field(default_factory=dict)
    bytes: int = 0
    speed: list[SpeedPoint] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form. A rerun changes only the times: `seconds` and the rates in `speed`."""
        tasks = {
            name: {metric: score.to_dict() for metric, score in result.scores.items()}
            for name, result in self.tasks.items()
        }
        texts = {name: {key: score.to_dict() for key, score in scores.items()} for name, scores in self.texts.items()}
        recall = {name: score.to_dict() for name, score in self.recall.items()}
        speed = [point.to_dict() for point in self.speed]
        return {
            "bytes": self.bytes,
            "tasks": tasks,
            "texts": texts,
            "recall": recall,
            "speed": speed,
            "seconds": self.seconds,
        }


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

    for name, windows in material.texts.items():
        scores = score_text(model, windows, teacher)
        found = {"perplexity": scores.perplexity, "kl": scores.kl, "agreement": scores.agreement}
        result.texts[name] = {key: score for key, score in found.items() if score is not None}
    if material.texts:
        lap("texts")
    result.recall["repeat_perplexity"] = score_repeat(model, material.repeat)
    for name, probes in material.recall.items():
        result.answers[name] = _exact(model, probes)
        result.recall[name] = result.answers[name].score
        if teacher is None:
            result.control[name] = _exact(model, [probe.without_facts() for probe in probes])
    result.bytes = sequence_bytes(model, BYTES_AT)
    with torch.inference_mode():
        for name, requests in material.last_word.items():
            result.recall[f"last_word_{name}"] = exact_match(
                _last_logits(model), requests, model.device, token_budget(model)
            )
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


def _exact(model: PreTrainedModel, probes: list[Probe]) -> Clusters:
    """Exact answers, clustered by probe."""
    outcomes = answer_outcomes(model, probes)
    return Clusters.of(outcomes.exact, outcomes.owners)


def _last_logits(model: PreTrainedModel) -> Callable[[Tensor, int], Tensor]:
    return lambda ids, keep: model(ids, use_cache=False, logits_to_keep=keep).logits
