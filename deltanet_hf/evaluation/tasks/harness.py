"""Runs lm-eval tasks for several models and keeps the score of every sample.

Prompts are built and tokenised once. lm-eval's `simple_evaluate` rebuilds them for each model, which takes longer than
a small model's answers. Tasks, requests, filters and metrics are lm-eval's; this module replaces the loop around them.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerBase

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.tasks.code_eval import code_runs_here
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.evaluation.tasks.lm_eval_patches import quiet_lm_eval, templates_compiled_once
from deltanet_hf.evaluation.tasks.local_data import blimp_paradigms, write_task_folder
from deltanet_hf.evaluation.tasks.ruler import Ruler
from deltanet_hf.evaluation.tasks.suites import SuiteTask, draw_rows


@dataclass
class TaskResult:
    """Scores of one task.

    Attributes:
        samples: values [n] of the task's metric per sample, in an order that all models share.
        scores: metric -> score.
    """

    samples: np.ndarray
    scores: dict[str, Score]


class Harness:
    """The tasks of a suite with their requests, which any number of models can answer.

    Args:
        tasks: tasks of the suite; those without data are left out and listed in `missing`.
        data: folder of local files; None loads rows from the Hub.
        limit: largest number of rows per task (BLiMP counts as one task); None for no limit.
        ruler: how RULER's texts are made; None leaves out its tasks.
        chat: puts the prompts into its chat template, if it has one; None leaves them as they are.

    Raises UserError if no task has data or rows cannot be loaded.
    """

    def __init__(
        self,
        tasks: tuple[SuiteTask, ...],
        data: Path | None,
        limit: int | None,
        ruler: Ruler | None = None,
        chat: PreTrainedTokenizerBase | None = None,
    ) -> None:
        quiet_lm_eval()
        self._chat: dict[str, Any] = {}
        if chat is not None and chat.chat_template is not None:
            template = partial(chat.apply_chat_template, tokenize=False)
            self._chat = {"apply_chat_template": True, "chat_template": template}
        self.missing: list[str] = []
        self.parts: dict[str, list[ConfigurableTask]] = {}
        self.tasks: list[SuiteTask] = []
        self._token_cache: dict[str, list[tuple[Any, list[int], list[int]]]] = {}
        with tempfile.TemporaryDirectory(prefix="deltanet-tasks-") as folder, templates_compiled_once():
            known = write_task_folder(Path(folder), data) + (ruler.write_tasks(Path(folder)) if ruler else [])
            # Reading the stock index takes up to half a minute; local tasks and this package's own work without it.
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
            raise UserError(f"{data}: has no data for any of the suite's tasks, which are {', '.join(self.missing)}")

    def _build(
        self, task: SuiteTask, names: list[str], manager: TaskManager, limit: int | None
    ) -> list[ConfigurableTask]:
        count = min((n for n in (task.rows, limit) if n is not None), default=None)
        each = None if count is None else -(-count // len(names))
        built = []
        try:
            with code_runs_here():
                loaded = manager.load(names)["tasks"]
        except OSError as error:
            raise UserError(f"{task.name}: {one_line(error, 300)}; give local files with --data") from error
        for part in loaded.values():
            if part.config.num_fewshot is None:
                part.set_config(key="num_fewshot", value=0)
            part.set_fewshot_seed(seed=1234)
            rows = draw_rows(part.config.task, len(part.eval_docs), each)
            with contextlib.redirect_stderr(io.StringIO()):  # hides one progress bar per task, of which BLiMP has 67
                part.build_all_requests(samples=rows, rank=0, world_size=1, **self._chat)
            built.append(part)
        return built

    def run(self, lm: DeltaNetLM) -> dict[str, TaskResult]:
        """Task name -> scores of one model."""
        instances = [i for parts in self.parts.values() for part in parts for i in part.instances]
        for kind in sorted({instance.request_type for instance in instances}):
            requests = [instance for instance in instances if instance.request_type == kind]
            answers = self._log_likelihoods(lm, requests) if kind == "loglikelihood" else getattr(lm, kind)(requests)
            for instance, answer in zip(requests, answers, strict=True):
                instance.resps = [answer]
        with templates_compiled_once():
            return {task.name: _collect(task, self.parts[task.name]) for task in self.tasks}

    def _log_likelihoods(self, lm: DeltaNetLM, instances: list[Any]) -> list[tuple[float, bool]]:
        key = f"{lm.tokenizer.name_or_path} {len(lm.tokenizer)} {lm.tokenizer.backend_tokenizer.to_str()}"
        if key not in self._token_cache:
            self._token_cache = {key: lm.tokenise(instances)}
        return lm.score_tokens(self._token_cache[key])


def _members(name: str, known: list[str]) -> list[str]:
    """The known ones among the lm-eval tasks of a suite's task: itself, or the paradigms of BLiMP."""
    return [task for task in (blimp_paradigms() if name == "blimp" else [name]) if task in known]


def _collect(task: SuiteTask, parts: list[ConfigurableTask]) -> TaskResult:
    """Scores of a task from its answered requests, through lm-eval's filters and `process_results`."""
    samples: dict[str, list[Any]] = {}
    for part in parts:
        part.apply_filters()
        by_doc: dict[int, list[Any]] = {}
        for instance in part.instances:
            by_doc.setdefault(instance.doc_id, []).append(instance)
        # The last filter is the most lenient one: for GSM8K, it accepts the last number anywhere, not only after ####.
        chosen = list(part.instances[0].filtered_resps)[-1]

        def metrics_of(instances: list[Any], part: ConfigurableTask = part, chosen: str = chosen) -> dict[str, Any]:
            ordered = sorted(instances, key=lambda instance: instance.idx)
            answers = [instance.filtered_resps[chosen] for instance in ordered]
            return part.process_results(instances[0].doc, answers)  # type: ignore[no-any-return]

        # Programs that a model wrote run in processes of their own, side by side.
        with ThreadPoolExecutor(os.cpu_count() if part.config.unsafe_code else 1) as threads:
            found = list(threads.map(metrics_of, by_doc.values()))
        for metric, value in (pair for metrics in found for pair in metrics.items()):
            samples.setdefault(metric, []).append(value)
    scores: dict[str, Score] = {}
    for metric, values in samples.items():
        if metric == "perplexity":
            scores[metric] = Clusters.each([-value for value in values]).perplexity
        elif isinstance(values[0], list):  # several values per row, as IFEval's instructions
            scores[metric] = Clusters(
                np.array([sum(row) for row in values]), np.array([len(row) for row in values])
            ).score
        else:
            scores[metric] = Clusters.each([float(value) for value in values]).score
    if task.name == "blimp":
        scores["acc"] = _stratified(parts, samples["acc"])
    return TaskResult(np.asarray([float(value) for value in samples[task.metric]]), scores)


def _stratified(parts: list[ConfigurableTask], values: list[float]) -> Score:
    """Mean of the means of BLiMP's paradigms; the error is that of a stratified sample.

    With one row of each paradigm, which shows no spread within it, the error is that over the rows.
    """
    if len(values) == len(parts):
        return Clusters.each(values).score
    means, variances, start = [], [], 0
    for part in parts:
        count = len({instance.doc_id for instance in part.instances})
        score = Clusters.each(values[start : start + count]).score
        means.append(score.value)
        variances.append(score.stderr**2)
        start += count
    return Score(float(np.mean(means)), float(np.sqrt(np.sum(variances)) / len(means)), len(values))
