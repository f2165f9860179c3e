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

from deltanet_hf.evaluation.measures.continuations import TokenRequest, exact_match
from deltanet_hf.evaluation.measures.scores import Score, mean_score, perplexity_score
from deltanet_hf.evaluation.measures.text_scores import repeat_means, window_means
from deltanet_hf.loading import load_model
from deltanet_hf.models.restrict import restrict_to_window
from deltanet_recipes.data.prepare import REPORT
from deltanet_recipes.training.model_pair import place
from measuring.rows import Row

TEXT_WINDOW = 1024  # tokens per window of a text
SEGMENT = 256  # tokens per segment of the exact repeat
SEGMENTS = 64
TEXTS = {"wt2": 64, "heldwiki": 64, "anarchism": 40}  # array -> largest number of windows
ROWS = 8  # windows or segments per forward pass
WORD_ROWS = 32  # passages per forward pass


class Measure:
    """Measures models against one teacher; its logits are computed again for each model.

    Args:
        arrays: folder with wt2.npy, heldwiki.npy, anarchism.npy (token ids) and lastword.json.gz.
        device: the device of the teacher and of all models.
        windows: largest number of windows, segments and words of each array; None for no limit.
    """

    def __init__(self, arrays: Path, teacher: nn.Module, device: torch.device, windows: int | None = None) -> None:
        self.teacher, self.device, self.windows = teacher, device, windows
        self.tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name in TEXTS}
        with gzip.open(arrays / "lastword.json.gz", "rt") as file:
            self.words: dict[str, list[list[list[int]]]] = json.load(file)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Name of a figure -> {"value", "stderr"}."""
        figures: dict[str, dict[str, float]] = {}
        for name, limit in TEXTS.items():
            windows = self._cut(self.tokens[name], TEXT_WINDOW, limit)
            means = window_means(model, windows, ROWS, self.teacher if name == "heldwiki" else None)
            figures[f"{name}.perplexity"] = _figure(perplexity_score(means.losses))
            if means.divergences:
                figures[f"{name}.kl"] = _figure(mean_score(means.divergences))
        segments = self._cut(self.tokens["heldwiki"], SEGMENT, SEGMENTS)
        figures["repeat.perplexity"] = _figure(perplexity_score(repeat_means(model, segments, ROWS)))
        for name, cases in self.words.items():
            figures[f"lastword.{name}"] = _figure(self._last_words(model, cases[: self.windows]))
        return figures

    def _cut(self, tokens: np.ndarray, size: int, limit: int) -> torch.Tensor:
        """The first windows [n, size] int64 of an array, on the device."""
        count = min(len(tokens) // size, limit, self.windows or limit)
        return torch.from_numpy(tokens[: count * size].reshape(count, size)).to(self.device)

    def _last_words(self, model: nn.Module, cases: list[list[list[int]]]) -> Score:
        """Share of cases (context ids, word ids) for which greedy decoding gives the whole word."""
        longest = max(len(context) + len(word) for context, word in cases)
        requests = [TokenRequest.truncated(context, word, longest) for context, word in cases]

        def last_logits(ids: torch.Tensor, keep: int) -> torch.Tensor:
            return model(ids, use_cache=False).logits[:, -keep:]

        return exact_match(last_logits, requests, self.device, WORD_ROWS * longest, WORD_ROWS)


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


def make_row(name: str, folder: Path, model: nn.Module, measure: Measure) -> Row:
    """The row of a model that was loaded from `folder`."""
    facts = {**conversion_facts(folder), **run_facts(folder)}
    return {"run": name, "tokens": 0, **facts, "metrics": measure(model)}


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
        key: report["options"].get(key)
        for key in ("mixer", "profile", "training", "set", "fit_memory", "layers", "seed")
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
