"""Everything that a report measures on one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.evaluation.harness import Harness, TaskResult
from deltanet_hf.evaluation.lm import DeltaNetLM
from deltanet_hf.evaluation.perplexity import score_repeat, score_text
from deltanet_hf.evaluation.recall import Probe, associative_recall, needles, score_probes
from deltanet_hf.evaluation.scores import Score, mean_score
from deltanet_hf.evaluation.scoring import TokenRequest, score_continuations, token_budget
from deltanet_hf.evaluation.speed import SpeedPoint, measure_speed
from deltanet_hf.evaluation.suite import Suite

REPEATED = 256


@dataclass
class Material:
    """Inputs shared by all models of a report.

    Attributes:
        texts: name -> windows [N, T] of token ids.
        repeat: segments [N, 256] for the exact repeat.
        recall: name of a probe set -> probes; `needle_LENGTH` and `mqar_PAIRS`.
        last_word: (context ids, target ids) by name, greedy exact match.
    """

    harness: Harness | None
    texts: dict[str, Tensor]
    repeat: Tensor | None
    recall: dict[str, list[Probe]]
    last_word: dict[str, list[TokenRequest]]
    speed_lengths: tuple[int, ...]


@dataclass
class Measured:
    """All scores of one model: tasks by name and metric, the other measurements by name."""

    tasks: dict[str, TaskResult] = field(default_factory=dict)
    texts: dict[str, dict[str, Score]] = field(default_factory=dict)
    recall: dict[str, Score] = field(default_factory=dict)
    speed: list[SpeedPoint] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `speed` and `seconds` are the only entries that differ between reruns."""
        tasks = {
            name: {metric: score.to_dict() for metric, score in result.scores.items()}
            for name, result in self.tasks.items()
        }
        texts = {name: {key: score.to_dict() for key, score in scores.items()} for name, scores in self.texts.items()}
        recall = {name: score.to_dict() for name, score in self.recall.items()}
        speed = [point.to_dict() for point in self.speed]
        return {"tasks": tasks, "texts": texts, "recall": recall, "speed": speed, "seconds": self.seconds}


def build_recall(
    suite: Suite, tokenizer: PreTrainedTokenizerBase, haystack: np.ndarray, max_length: int, probes: int
) -> dict[str, list[Probe]]:
    """The suite's recall probes that fit into `max_length` tokens."""
    built = {f"mqar_{pairs}": associative_recall(tokenizer, pairs, probes) for pairs in suite.pairs}
    for length in suite.needle_lengths:
        if length <= max_length:
            built[f"needle_{length}"] = needles(tokenizer, haystack, length, probes)
    return built


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    teacher: PreTrainedModel | None,
    material: Material,
    say: Callable[[str], None],
) -> Measured:
    """Measure one model; `teacher` is None for the teacher itself (no KL)."""
    result = Measured()
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
    lap("texts")
    if material.repeat is not None:
        result.recall["repeat_perplexity"] = score_repeat(model, material.repeat)
    for name, probes in material.recall.items():
        result.recall[name] = score_probes(model, probes)
    for name, requests in material.last_word.items():
        result.recall[f"last_word_{name}"] = _last_words(model, requests)
    lap("recall")
    if material.harness is not None:
        lm = DeltaNetLM(model, tokenizer=tokenizer, batch_size="auto")
        result.tasks = material.harness.run(lm)
        lap("tasks")
    for length in material.speed_lengths:
        result.speed.append(measure_speed(model, length))
    if material.speed_lengths:
        lap("speed")
    return result


@torch.inference_mode()
def _last_words(model: PreTrainedModel, requests: list[TokenRequest]) -> Score:
    def last_logits(ids: Tensor, keep: int) -> Tensor:
        return model(ids, use_cache=False, logits_to_keep=keep).logits

    answers = score_continuations(last_logits, requests, model.device, token_budget(model))
    return mean_score([float(greedy) for _, greedy in answers])
