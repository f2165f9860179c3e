"""Measuring the rows of a report: one after the other, or several at once in processes of their own."""

from __future__ import annotations

import gzip
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from deltanet_hf.data import shipped_texts, with_prefix
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.contestants import BASELINES, Contestant, Roster
from deltanet_hf.evaluation.harness import Harness
from deltanet_hf.evaluation.measure import REPEATED, Material, Measured, build_recall, measure
from deltanet_hf.evaluation.scoring import TokenRequest
from deltanet_hf.evaluation.suite import SEED, SUITES, Suite, SuiteTask
from deltanet_hf.evaluation.texts import encode_documents, read_text, token_ids, windows
from deltanet_hf.evaluation.wikitext import wikitext_texts

WINDOW = 1024


@dataclass(frozen=True)
class ReportOptions:
    """What to compare, and on what.

    Attributes:
        data: folder of NAME/SPLIT.jsonl.gz files; None for the hub.
        texts: name -> file for perplexity and KL, besides WikiText-2 if `data` has it. The first one that is not
            WikiText-2 also gives the segments of the exact repeat.
        windows: windows of 1024 tokens per text.
        haystack: text file of the needle task; None for the text that ships with this package.
        last_word: JSON file {name: [[context ids, target ids], ...]}.
        limit: at most this many rows per task, windows per text and recall probes.
        max_length: longest context of needles and speed; None for the teacher's own.
        dtype: "auto" for each model's stored one, or a torch name.
        processes: models measured at once; with GPUs, one process on each.
    """

    teacher: str
    students: list[str]
    out: Path
    suite: str = "small"
    data: Path | None = None
    texts: dict[str, Path] = field(default_factory=dict)
    windows: int = 64
    haystack: Path | None = None
    last_word: Path | None = None
    baselines: tuple[str, ...] = BASELINES
    limit: int | None = None
    max_length: int | None = None
    device: str | None = None
    dtype: str = "auto"
    processes: int = 1


class Bench:
    """Everything that measuring needs, read and checked; the teacher is loaded."""

    def __init__(self, options: ReportOptions, rows: list[Contestant]) -> None:
        self.options = options
        self.roster = Roster(rows, options.device, options.dtype)
        self.material = _prepare(options, SUITES[options.suite], self.roster)

    def measure(self, row: Contestant, say: Callable[[str], None]) -> Measured:
        """All scores of a row."""
        teacher = None if row.kind == "teacher" else self.roster.teacher
        return measure(self.roster.model(row), self.roster.tokenizer, teacher, self.material, say)

    def tasks(self) -> list[SuiteTask]:
        """The suite's tasks that there is data for."""
        return self.material.harness.tasks if self.material.harness else []

    def settings(self) -> dict[str, Any]:
        """What was measured, on what, with what."""
        harness, device = self.material.harness, self.roster.device
        return {
            "suite": self.options.suite,
            "tasks": {task.name: {"metric": task.metric, "chance": task.chance} for task in self.tasks()},
            "without_data": harness.missing if harness else [],
            "windows": {name: list(text.shape) for name, text in self.material.texts.items()},
            "limit": self.options.limit,
            "seed": SEED,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "dtype": self.options.dtype,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


@dataclass
class Outcome:
    """A measured row, and the bench it was measured on."""

    measured: Measured
    tasks: list[SuiteTask]
    settings: dict[str, Any]


def measure_rows(options: ReportOptions, rows: list[Contestant], say: Callable[[str], None]) -> Iterator[Outcome]:
    """The outcome of every row, in order."""
    if options.processes == 1:
        bench = Bench(options, rows)
        for number, row in enumerate(rows, start=1):
            say(f"{row.name} ({number} of {len(rows)})")
            yield Outcome(bench.measure(row, lambda text: say(f"  {text}")), bench.tasks(), bench.settings())
        return
    count = min(options.processes, len(rows))
    gpus = torch.cuda.device_count() if options.device is None else 0
    if gpus and count > gpus:
        raise UserError(f"--processes {count}: there are {gpus} GPUs, one for each process")
    context = multiprocessing.get_context("spawn")
    places: Any = context.Queue()
    for place in range(count):
        places.put(f"cuda:{place}" if gpus else options.device)
    with ProcessPoolExecutor(count, context, _begin, (options, rows, places)) as pool:
        yield from pool.map(_measure, range(len(rows)))


_here: dict[str, Any] = {}  # of a process of the pool


def _begin(options: ReportOptions, rows: list[Contestant], places: Any) -> None:
    device = places.get()
    if device is not None and device.startswith("cuda"):
        torch.cuda.set_device(device)
    _here.update(options=replace(options, device=device), rows=rows)


def _measure(index: int) -> Outcome:
    if "bench" not in _here:  # not in _begin, whose errors would not reach the caller
        _here["bench"] = Bench(_here["options"], _here["rows"])
    bench, row = _here["bench"], _here["rows"][index]
    measured = bench.measure(row, lambda text: print(f"{row.name}: {text}", flush=True))
    return Outcome(measured, bench.tasks(), bench.settings())


def _prepare(options: ReportOptions, suite: Suite, roster: Roster) -> Material:
    """Read, tokenise and check all inputs before the first model runs."""
    tokenizer = roster.tokenizer
    count = min(options.windows, options.limit or options.windows)
    probes = min(suite.probes, options.limit or suite.probes)
    context = options.max_length or int(roster.teacher.config.get_text_config().max_position_embeddings)
    texts = {}
    repeat = None
    for name, path in options.texts.items():
        ids = token_ids(path, tokenizer, WINDOW)
        texts[name] = with_prefix(windows(ids, WINDOW, count), tokenizer)
        if repeat is None:
            repeat = windows(ids, REPEATED, count)
    for name, text in wikitext_texts(options.data).items():
        ids = encode_documents([text], tokenizer, count * WINDOW)
        texts[name] = with_prefix(windows(ids, WINDOW, count), tokenizer)
    sources = [options.haystack] if options.haystack else shipped_texts()
    documents = [document for path in sources for document in read_text(path)]
    haystack = encode_documents(documents, tokenizer, 10 * context)
    if repeat is None:
        repeat = windows(haystack, REPEATED, count)
    harness = Harness(suite.tasks, options.data, options.limit) if suite.tasks else None
    return Material(
        harness=harness,
        texts=texts,
        repeat=repeat,
        recall=build_recall(suite, tokenizer, haystack, context, probes),
        last_word=_read_last_word(options.last_word, options.limit),
        speed_lengths=tuple(length for length in suite.speed_lengths if length <= context),
    )


def _read_last_word(path: Path | None, limit: int | None) -> dict[str, list[TokenRequest]]:
    if path is None:
        return {}
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as stream:
            groups = json.load(stream)
        return {
            name: [TokenRequest.truncated(context, target, 10**6) for context, target in pairs[:limit]]
            for name, pairs in groups.items()
        }
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: expected JSON {{name: [[context ids, target ids], ...]}} ({error})") from error
