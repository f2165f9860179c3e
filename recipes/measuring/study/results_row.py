"""Rows of the results table: figures on token arrays, `python -m measuring.study.measure texts`.

The figures are:

- perplexity over windows of 1024 tokens without overlap, per text;
- KL(teacher || model) in nats per token, on the held-out text;
- perplexity of the second copy of a 256-token segment that occurs twice in a row;
- share of passages whose last word greedy decoding gives exactly.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltanet_hf.evaluation.measures.continuations import TokenRequest
from deltanet_hf.evaluation.measures.measure import Measured, Settings, Text, measure, repeated
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.measures.text_scores import Forward
from deltanet_hf.evaluation.tasks.text_windows import windows
from deltanet_hf.loading import load_model
from deltanet_hf.models.restrict import restrict_to_window
from deltanet_recipes.data.prepare import REPORT
from deltanet_recipes.training.model_pair import place
from measuring.rows import Row

TEXT_WINDOW = 1024  # tokens per window of a text
SEGMENT = 256  # tokens per segment of the exact repeat
SEGMENTS = 64
TEXTS = {"wt2": 64, "heldwiki": 64, "anarchism": 40}  # array -> largest number of windows
COMPARED = "heldwiki"  # the array that the teacher reads, too, and whose segments are repeated
LONGEST = 10**6  # tokens of a passage


def text_settings(arrays: Path, teacher: Forward, limit: int | None = None) -> Settings:
    """What is measured beside a teacher.

    Args:
        arrays: folder with wt2.npy, heldwiki.npy, anarchism.npy (token ids) and lastword.json.gz.
        limit: largest number of windows, segments and words of each array; None for no limit.
    """
    tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name in TEXTS}
    texts = {
        name: Text(windows(tokens[name], TEXT_WINDOW, min(count, limit or count)), compared=name == COMPARED)
        for name, count in TEXTS.items()
    }
    texts["repeat"] = repeated(windows(tokens[COMPARED], SEGMENT, min(SEGMENTS, limit or SEGMENTS)))
    with gzip.open(arrays / "lastword.json.gz", "rt") as file:
        cases: dict[str, list[list[list[int]]]] = json.load(file)
    words = {
        f"lastword.{name}": [TokenRequest.truncated(context, word, LONGEST) for context, word in some[:limit]]
        for name, some in cases.items()
    }
    return Settings(texts, teacher, words=words)


def metrics(measured: Measured) -> dict[str, dict[str, float]]:
    """Name of a figure -> {"value", "stderr"}."""
    clusters, found = measured.clusters, {}
    for name in (*TEXTS, "repeat"):
        found[f"{name}.perplexity"] = clusters[f"loss_{name}"].perplexity
        if f"kl_{name}" in clusters:
            found[f"{name}.kl"] = clusters[f"kl_{name}"].score
    found |= {name: part.score for name, part in clusters.items() if name.startswith("lastword.")}
    return {name: _figure(score) for name, score in found.items()}


def _figure(score: Score) -> dict[str, float]:
    """JSON form of a score; the error of a single item is given as 0."""
    return {"value": score.value, "stderr": score.stderr if score.items > 1 else 0.0}


def load_for_measure(folder: str, device: torch.device, window: bool = False) -> nn.Module:
    """Load a teacher or student in eval mode, in bfloat16 on a GPU and float32 on a CPU.

    Args:
        window: put softmax layers under a window of 64 tokens + 4 sinks.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(folder, Path(folder), dtype, attn_implementation="sdpa")
    return place(restrict_to_window(model) if window else model, device)


def make_row(name: str, folder: Path, model: Any, settings: Settings) -> Row:
    """The row of a model that was loaded from `folder`."""
    facts = {**conversion_facts(folder), **run_facts(folder)}
    return {"run": name, "tokens": 0, **facts, "metrics": metrics(measure(model, settings))}


def shown(row: Row) -> str:
    """The figures of a row in one line."""
    return "  ".join(f"{key} {figure['value']:.4g}" for key, figure in row["metrics"].items())


def conversion_facts(folder: Path) -> dict[str, Any]:
    """Options of a model's conversion and its quality before training; empty for a model that was not converted."""
    path = folder / "conversion.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    if "options" not in report:
        return {}
    options = {
        key: report["options"].get(key) for key in ("mixer", "profile", "training", "set", "fit_memory", "keep", "seed")
    }
    start = {key: report["held_out"][key] for key in ("perplexity", "kl")}
    start["relative_mse"] = float(np.mean([layer["relative_mse"] for layer in report["layers"]]))
    return {"conversion": options, "start": start}


def run_facts(folder: Path) -> dict[str, Any]:
    """Recipe, tokens, data, seed, seconds and speed of the run that made a model; empty without recipe.json."""
    recipe, log = folder / "recipe.json", folder.parent / "log.jsonl"
    if not recipe.is_file() or not log.is_file():
        return {}
    settings = json.loads(recipe.read_text())
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    last = {row["stage"]: row for row in rows}
    seconds = sum(row["seconds"] for row in last.values())
    tokens = sum(row["tokens"] for row in last.values())
    speeds = {
        stage: float(np.median([row["tokens_per_second"] for row in rows if row["stage"] == stage and row["step"] > 0]))
        for stage in last
    }
    return {
        "recipe": {
            "stages": settings["stages"],
            "data": _without_folders(settings["data"]),
            "seed": settings["seed"],
        },
        "tokens": tokens,
        "corpora": _corpora(folder.parent / REPORT),
        "seed": settings["seed"],
        "seconds": seconds,
        "tokens_per_second": speeds,
        "held_out": {stage: {k: v for k, v in row.items() if k.startswith("held_out.")} for stage, row in last.items()},
    }


def _corpora(path: Path) -> list[dict[str, Any]]:
    """The counts of each data source of a run: documents and tokens read, held out, dropped and kept."""
    reports = json.loads(path.read_text()) if path.is_file() else []
    return [
        {"source": Path(report["source"]["path"] or report["source"]["hub"]).name}
        | {key: value for key, value in report.items() if key.startswith(("documents", "tokens", "contaminated"))}
        for report in reports
        if "documents" in report
    ]


def _without_folders(data: dict[str, Any]) -> dict[str, Any]:
    """The data settings with file names instead of paths, which mean nothing on another machine."""
    sources = [
        {key: value for key, value in source.items() if key != "evaluation"}
        | {"path": source["path"] and Path(source["path"]).name}
        for source in data["sources"]
    ]
    names = [Path(name).name for name in data["decontaminate"]]
    return {**{key: value for key, value in data.items() if key != "cache"}, "sources": sources, "decontaminate": names}
