"""Measures the models of a report, one after the other or in parallel processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report.material import ReportOptions, read_material
from deltanet_hf.evaluation.report.model_rows import ModelRow, ModelRows
from deltanet_hf.evaluation.report.model_scores import ModelScores, measure_model
from deltanet_hf.evaluation.tasks.suites import SEED, SuiteTask


class Bench:
    """The report's inputs and its teacher, loaded; measures one model at a time."""

    def __init__(self, options: ReportOptions, rows: list[ModelRow]) -> None:
        self.options = options
        self.models = ModelRows(rows, options.device, options.dtype)
        longest = int(self.models.teacher.config.get_text_config().max_position_embeddings)
        self.material = read_material(options, self.models.tokenizer, longest)

    def measure(self, row: ModelRow, say: Callable[[str], None]) -> ModelScores:
        """All scores of the model of a row; `say` receives lines of progress."""
        teacher = None if row.kind == "teacher" else self.models.teacher
        return measure_model(self.models.model(row), self.models.tokenizer, teacher, self.material, say)

    def tasks(self) -> list[SuiteTask]:
        """The tasks of the suite that have data."""
        return self.material.harness.tasks if self.material.harness else []

    def settings(self) -> dict[str, Any]:
        """The conditions of the measurement, for the report's JSON."""
        harness, device = self.material.harness, self.models.device
        return {
            "suite": self.options.suite,
            "tasks": {task.name: {"metric": task.metric, "chance": task.chance} for task in self.tasks()},
            "without_data": harness.missing if harness else [],
            "windows": {name: list(text.shape) for name, text in self.material.texts.items()},
            "limit": self.options.limit,
            "seed": SEED,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "dtype": self.models.dtype,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


@dataclass
class Outcome:
    """The scores of a row's model, with the tasks and settings of the bench that measured it."""

    scores: ModelScores
    tasks: list[SuiteTask]
    settings: dict[str, Any]


def measure_rows(
    options: ReportOptions, rows: list[ModelRow], say: Callable[[str], None], done: int = 0
) -> Iterator[Outcome]:
    """The outcome of each row after the first `done`, in order.

    Raises UserError if there are fewer GPUs than processes.
    """
    if done == len(rows):
        return
    say(f"measures {', '.join(row.name for row in rows[done:])}")
    if options.processes == 1:
        bench = Bench(options, rows)
        for number, row in enumerate(rows[done:], start=done + 1):
            say(f"{row.name} ({number} of {len(rows)})")
            yield Outcome(bench.measure(row, lambda text: say(f"  {text}")), bench.tasks(), bench.settings())
        return
    count = min(options.processes, len(rows) - done)
    gpus = torch.cuda.device_count() if options.device is None else 0
    if gpus and count > gpus:
        raise UserError(f"--processes {count}: only {gpus} GPUs are present; each process uses one")
    context = multiprocessing.get_context("spawn")
    devices: Any = context.Queue()
    for index in range(count):
        devices.put(f"cuda:{index}" if gpus else options.device)
    with ProcessPoolExecutor(count, context, _initialise_process, (options, rows, devices)) as pool:
        yield from pool.map(_measure_in_process, range(done, len(rows)))


_process: dict[str, Any] = {}  # the state of a process of the pool


def _initialise_process(options: ReportOptions, rows: list[ModelRow], devices: Any) -> None:
    device = devices.get()
    if device is not None and device.startswith("cuda"):
        torch.cuda.set_device(device)
    _process.update(options=replace(options, device=device), rows=rows)


def _measure_in_process(index: int) -> Outcome:
    if "bench" not in _process:  # built here, because errors of the initialiser do not reach the caller
        _process["bench"] = Bench(_process["options"], _process["rows"])
    bench, row = _process["bench"], _process["rows"][index]
    scores = bench.measure(row, lambda text: print(f"{row.name}: {text}", flush=True))
    return Outcome(scores, bench.tasks(), bench.settings())
