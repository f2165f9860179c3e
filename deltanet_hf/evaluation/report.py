"""`deltanet-hf report`: a teacher, its students and untrained baselines in one table, with plots and JSON."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from deltanet_hf.data import shipped_texts
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.average import percent_of_teacher
from deltanet_hf.evaluation.contestants import BASELINES, Contestant, Roster, line_up
from deltanet_hf.evaluation.harness import Harness
from deltanet_hf.evaluation.measure import REPEATED, Material, Measured, build_recall, measure
from deltanet_hf.evaluation.plots import write_plots
from deltanet_hf.evaluation.scoring import TokenRequest
from deltanet_hf.evaluation.suite import SEED, SUITES, Suite, SuiteTask
from deltanet_hf.evaluation.table import markdown
from deltanet_hf.evaluation.texts import encode_documents, read_text, token_ids, windows, with_prefix
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


@dataclass
class Row:
    contestant: Contestant
    measured: Measured
    percent: Any = None


def run_report(options: ReportOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure every model and write report.md, report.json and the plots into `options.out`; returns the JSON.

    Files are rewritten after each model, so an interrupted run leaves what it finished.
    """
    if options.suite not in SUITES:
        raise UserError(f"--suite {options.suite}: unknown; choose one of {', '.join(SUITES)}")
    if unknown := sorted(set(options.baselines) - set(BASELINES)):
        raise UserError(f"--baselines {unknown[0]}: unknown; choose from {', '.join(BASELINES)}")
    suite = SUITES[options.suite]
    roster = Roster(line_up(options.teacher, options.students, options.baselines), options.device, options.dtype)
    material = _prepare(options, suite, roster)
    options.out.mkdir(parents=True, exist_ok=True)
    averaged: list[SuiteTask] = material.harness.tasks if material.harness else []
    rows: list[Row] = []
    document: dict[str, Any] = {}
    for contestant, model in roster:
        say(f"{contestant.name} ({len(rows) + 1} of {len(roster.rows)})")
        teacher = None if contestant.kind == "teacher" else roster.teacher
        row = Row(contestant, measure(model, roster.tokenizer, teacher, material, lambda text: say(f"  {text}")))
        rows.append(row)
        row.percent = percent_of_teacher(row.measured.tasks, rows[0].measured.tasks, averaged) if averaged else None
        document = _document(options, rows, material, roster)
        (options.out / "report.json").write_text(json.dumps(document, indent=1))
        (options.out / "report.md").write_text(markdown(document))
    write_plots(document, options.out)
    return document


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


def _document(options: ReportOptions, rows: list[Row], material: Material, roster: Roster) -> dict[str, Any]:
    harness = material.harness
    device = torch.cuda.get_device_name(roster.device) if roster.device.type == "cuda" else "CPU"
    return {
        "settings": {
            "suite": options.suite,
            "tasks": {t.name: {"metric": t.metric, "chance": t.chance} for t in harness.tasks} if harness else {},
            "rows": {name: len(rows[0].measured.tasks[name].samples) for name in harness.parts} if harness else {},
            "without_data": harness.missing if harness else [],
            "windows": {name: list(text.shape) for name, text in material.texts.items()},
            "limit": options.limit,
            "seed": SEED,
            "device": device,
            "dtype": options.dtype,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "models": [
            {
                "name": row.contestant.name,
                "kind": row.contestant.kind,
                "folder": Path(row.contestant.folder).name,
                "training_tokens": row.contestant.tokens,
                "percent_of_teacher": row.percent.to_dict() if row.percent else None,
                **row.measured.to_dict(),
            }
            for row in rows
        ],
    }
