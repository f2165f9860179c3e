"""Runs lm-eval tasks for several models: prompts are built and tokenised once, and every sample's score is kept.

lm-eval's own `simple_evaluate` rebuilds all prompts for each model, which takes longer than a small model's answers.
Tasks, requests, filters and metrics are lm-eval's; only the loop around them is here.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.lm import DeltaNetLM
from deltanet_hf.evaluation.local_data import blimp_paradigms, write_task_folder
from deltanet_hf.evaluation.patches import quiet_lm_eval, templates_compiled_once
from deltanet_hf.evaluation.scores import Score, clustered_score, mean_score, perplexity_score
from deltanet_hf.evaluation.suite import SuiteTask, draw_rows


@dataclass
class TaskResult:
    """Scores of one task: `samples` [n] are the main metric's, in the order that all models share."""

    samples: np.ndarray
    scores: dict[str, Score]


class Harness:
    """The built tasks of a suite, ready to be answered by any number of models.

    Args:
        tasks: of the suite; those whose data is missing are left out and listed in `missing`.
        data: folder of local files, or None for the hub.
        limit: at most this many rows per task (BLiMP counts as one task).
    """

    def __init__(self, tasks: tuple[SuiteTask, ...], data: Path | None, limit: int | None) -> None:
        quiet_lm_eval()
        self.missing: list[str] = []
        self.parts: dict[str, list[ConfigurableTask]] = {}
        self.tasks: list[SuiteTask] = []
        self._token_cache: dict[str, list[tuple[Any, list[int], list[int]]]] = {}
        with tempfile.TemporaryDirectory(prefix="deltanet-tasks-") as folder, templates_compiled_once():
            known = write_task_folder(Path(folder), data)
            # Reading the stock index takes up to half a minute; local tasks and this package's own do not need it.
            stock = data is None and not all(_members(task.name, known) for task in tasks)
            manager = TaskManager(include_path=folder, include_defaults=stock)
            for task in tasks:
                names = _members(task.name, manager.all_subtasks if stock else known)
                if names:
                    self.tasks.append(task)
                    self.parts[task.name] = self._build(task, names, manager, limit)
                else:
                    self.missing.append(task.name)
        if not self.tasks:
            raise UserError(f"{data}: none of the suite's tasks has data there; needed: {', '.join(self.missing)}")

    def _build(
        self, task: SuiteTask, names: list[str], manager: TaskManager, limit: int | None
    ) -> list[ConfigurableTask]:
        wanted = min((n for n in (task.rows, limit) if n is not None), default=None)
        each = None if wanted is None else -(-wanted // len(names))
        built = []
        try:
            loaded = manager.load(names)["tasks"]
        except OSError as error:
            line = str(error).splitlines()[0]
            raise UserError(f"{task.name}: {line}; give local files with --data") from error
        for part in loaded.values():
            if part.config.num_fewshot is None:
                part.set_config(key="num_fewshot", value=0)
            part.set_fewshot_seed(seed=1234)
            rows = draw_rows(part.config.task, len(part.eval_docs), each)
            with contextlib.redirect_stderr(io.StringIO()):  # one progress bar per task is noise with 67 paradigms
                part.build_all_requests(samples=rows, rank=0, world_size=1)
            built.append(part)
        return built

    def run(self, lm: DeltaNetLM) -> dict[str, TaskResult]:
        """Answer everything with one model; scores by task name."""
        instances = [i for parts in self.parts.values() for part in parts for i in part.instances]
        for kind in sorted({instance.request_type for instance in instances}):
            asked = [instance for instance in instances if instance.request_type == kind]
            answers = self._log_likelihoods(lm, asked) if kind == "loglikelihood" else getattr(lm, kind)(asked)
            for instance, answer in zip(asked, answers, strict=True):
                instance.resps = [answer]
        with templates_compiled_once():
            return {task.name: _collect(task, self.parts[task.name]) for task in self.tasks}

    def _log_likelihoods(self, lm: DeltaNetLM, instances: list[Any]) -> list[tuple[float, bool]]:
        key = f"{lm.tokenizer.name_or_path} {len(lm.tokenizer)} {lm.tokenizer.backend_tokenizer.to_str()}"
        if key not in self._token_cache:
            self._token_cache = {key: lm.tokenise(instances)}
        return lm._loglikelihood_tokens(self._token_cache[key])


def _members(name: str, known: list[str]) -> list[str]:
    """The known tasks that `name` consists of: itself, or BLiMP's paradigms."""
    return [task for task in (blimp_paradigms() if name == "blimp" else [name]) if task in known]


def _collect(task: SuiteTask, parts: list[ConfigurableTask]) -> TaskResult:
    """Metrics of every document, through the task's own filters and `process_results`."""
    samples: dict[str, list[Any]] = {}
    clusters: list[int] = []
    for part in parts:
        part.apply_filters()
        by_doc: dict[int, list[Any]] = {}
        for instance in part.instances:
            by_doc.setdefault(instance.doc_id, []).append(instance)
        # The last filter is the most lenient one (GSM8K: the last number, not only the one after ####).
        chosen = list(part.instances[0].filtered_resps)[-1]
        for instances in by_doc.values():
            doc = instances[0].doc
            ordered = sorted(instances, key=lambda instance: instance.idx)
            metrics = part.process_results(doc, [instance.filtered_resps[chosen] for instance in ordered])
            for metric, value in metrics.items():
                samples.setdefault(metric, []).append(value)
            clusters.append(doc["group"] if "all_rotations" in metrics else len(clusters))
    scores: dict[str, Score] = {}
    for metric, values in samples.items():
        if metric == "perplexity":
            scores[metric] = perplexity_score([-value for value in values])
        elif metric == "all_rotations":
            groups: dict[int, float] = {}
            for group, right in values:
                groups[group] = min(groups.get(group, 1.0), right)
            scores[metric] = mean_score(list(groups.values()))
        else:
            scores[metric] = clustered_score([float(value) for value in values], clusters)
    if task.name == "blimp":
        scores["acc"] = _stratified(parts, samples["acc"])
    return TaskResult(np.asarray([float(value) for value in samples[task.metric]]), scores)


def _stratified(parts: list[ConfigurableTask], values: list[float]) -> Score:
    """Mean of the paradigms' means, with the error of a stratified sample."""
    means, variances, start = [], [], 0
    for part in parts:
        count = len({instance.doc_id for instance in part.instances})
        score = mean_score(values[start : start + count])
        means.append(score.value)
        variances.append(score.stderr**2)
        start += count
    return Score(float(np.mean(means)), float(np.sqrt(np.sum(variances)) / len(means)), len(values))
