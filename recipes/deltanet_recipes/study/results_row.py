"""The figures of the results table, from token arrays on disk.

Command: `python -m deltanet_recipes.study.results_row ARRAYS OUT ...`.

Perplexity over windows of 1024 tokens without overlap; KL to the teacher on the held-out text; perplexity of the second
copy of 256-token segments that occur twice in a row; greedy exact match of a passage's last word.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import deltanet_hf  # noqa: F401  (registers the converted families)
from deltanet_hf.mixers.window import restrict_to_window, restricted_as_saved
from deltanet_recipes.training.losses import kl_divergence
from deltanet_recipes.training.model_pair import place

WINDOW = 1024
SEGMENT = 256
TEXTS = {"wt2": 64, "heldwiki": 64, "anarchism": 40}  # array: windows scored at most
ROWS = 8  # windows in a batch


class Measure:
    """Evaluates models against one teacher, whose logits are recomputed for each student.

    Args:
        arrays: folder with wt2.npy, heldwiki.npy, anarchism.npy (token ids) and lastword.json.gz.
        windows: score at most this many windows (and as many segments and words) of each, None for all.
    """

    def __init__(self, arrays: Path, teacher: nn.Module, device: torch.device, windows: int | None = None) -> None:
        self.teacher, self.device, self.windows = teacher, device, windows
        self.tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name in TEXTS}
        with gzip.open(arrays / "lastword.json.gz", "rt") as file:
            self.words: dict[str, list[list[list[int]]]] = json.load(file)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Every metric as {"value", "stderr"}."""
        figures: dict[str, dict[str, float]] = {}
        for name, limit in TEXTS.items():
            losses, kls = self._score(model, self._cut(self.tokens[name], WINDOW, limit), name == "heldwiki")
            figures[f"{name}.perplexity"] = _perplexity(losses)
            if kls is not None:
                figures[f"{name}.kl"] = _mean(kls)
        figures["repeat.perplexity"] = _perplexity(self._repeat(model))
        for name, cases in self.words.items():
            figures[f"lastword.{name}"] = _mean(self._last_words(model, cases[: self.windows]))
        return figures

    def _cut(self, tokens: np.ndarray, size: int, limit: int) -> torch.Tensor:
        count = min(len(tokens) // size, limit, self.windows or limit)
        return torch.from_numpy(tokens[: count * size].reshape(count, size))

    def _score(
        self, model: nn.Module, windows: torch.Tensor, against: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mean loss of each window, and its mean KL to the teacher when asked for; nats per token."""
        losses, kls = [], []
        for ids in windows.split(ROWS):
            ids = ids.to(self.device)
            logits = model(ids, use_cache=False).logits[:, :-1]
            teacher = self.teacher(ids, use_cache=False).logits[:, :-1] if against else None
            for row in range(len(ids)):
                student = logits[row].float()
                losses.append(F.cross_entropy(student, ids[row, 1:]))
                if teacher is not None:
                    kls.append(kl_divergence(student, teacher[row].float()).mean())
        return torch.stack(losses).cpu(), torch.stack(kls).cpu() if kls else None

    def _repeat(self, model: nn.Module) -> torch.Tensor:
        """Mean loss of the second copy of each segment."""
        segments = self._cut(self.tokens["heldwiki"], SEGMENT, 64)
        losses = []
        for ids in segments.repeat(1, 2).split(ROWS):
            ids = ids.to(self.device)
            logits = model(ids, use_cache=False).logits[:, SEGMENT - 1 : -1].float()
            losses.append(F.cross_entropy(logits.transpose(1, 2), ids[:, SEGMENT:], reduction="none").mean(-1))
        return torch.cat(losses).cpu()

    def _last_words(self, model: nn.Module, cases: list[list[list[int]]]) -> torch.Tensor:
        """1 where greedy decoding gives the whole word. Rows are padded on the right, which a causal model ignores."""
        hits = []
        for batch in _batches(sorted(cases, key=lambda case: len(case[0])), 32):
            length = max(len(context) + len(word) for context, word in batch)
            ids = torch.zeros(len(batch), length, dtype=torch.long)
            for row, (context, word) in enumerate(batch):
                ids[row, : len(context) + len(word)] = torch.tensor(context + word)
            best = model(ids.to(self.device), use_cache=False).logits.argmax(-1).cpu()
            for row, (context, word) in enumerate(batch):
                predicted = best[row, len(context) - 1 : len(context) + len(word) - 1].tolist()
                hits.append(float(predicted == word))
        return torch.tensor(hits)


def _batches(cases: list[Any], size: int) -> Iterator[list[Any]]:
    for begin in range(0, len(cases), size):
        yield cases[begin : begin + size]


def _mean(values: torch.Tensor) -> dict[str, float]:
    spread = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"value": float(values.mean()), "stderr": spread}


def _perplexity(losses: torch.Tensor) -> dict[str, float]:
    """exp of the mean loss; its standard error by the delta method over windows."""
    loss = _mean(losses)
    value = math.exp(min(loss["value"], 50.0))
    return {"value": value, "stderr": value * loss["stderr"]}


def load_for_measure(folder: str, device: torch.device, window: bool = False) -> nn.Module:
    """A model in bfloat16 (float32 on CPU), teacher or student; a trained window baseline under its window.

    window: restrict a softmax model that was not trained for it.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return place(restrict_to_window(model) if window else restricted_as_saved(model), device).eval()


def append_rows(path: Path, rows: list[dict[str, Any]], order: Sequence[str] = ()) -> None:
    """Add rows to a results file; rows of the same run are replaced. Runs named in `order` come last, in that order."""
    old = json.loads(path.read_text()) if path.is_file() else []
    names = {row["run"] for row in rows}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    rows = [row for row in old if row["run"] not in names] + rows
    rows.sort(key=lambda row: order.index(row["run"]) if row["run"] in order else -1)
    partial.write_text(json.dumps(rows, indent=1) + "\n")
    partial.replace(path)


def main(
    arrays: Annotated[Path, typer.Argument(help="Folder with the token arrays.")],
    out: Annotated[Path, typer.Argument(help="JSON file to add rows to.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    model: Annotated[list[str], typer.Option(help="NAME=FOLDER of a model to measure; repeatable.")],
    windows: Annotated[int | None, typer.Option(help="Score at most this many windows of each text.")] = None,
    window: Annotated[
        bool, typer.Option("--window", help="Restrict the models to 64 tokens + 4 sinks, without training.")
    ] = False,
) -> None:
    """Measure models and add one row for each to a results file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measure = Measure(arrays, load_for_measure(teacher, device), device, windows)
    show: Callable[[str], None] = typer.echo
    for entry in model:
        name, _, folder = entry.partition("=")
        figures = measure(load_for_measure(folder, device, window))
        facts = {**conversion_facts(Path(folder)), **run_facts(Path(folder))}
        append_rows(out, [{"run": name, "tokens": 0, **facts, "metrics": figures}])
        show(f"{name}: " + "  ".join(f"{key} {figure['value']:.4g}" for key, figure in figures.items()))


def conversion_facts(folder: Path) -> dict[str, Any]:
    """How a model was converted and what its start was worth; empty for one that was not."""
    path = folder / "conversion.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    if "options" not in report:
        return {}
    options = {key: report["options"].get(key) for key in ("profile", "set", "fit_memory", "layers", "seed")}
    start = {key: report["held_out"][key] for key in ("perplexity", "kl")}
    start["relative_mse"] = float(np.mean([layer["relative_mse"] for layer in report["layers"]]))
    return {"conversion": options, "start": start}


def run_facts(folder: Path) -> dict[str, Any]:
    """Recipe, tokens, seed, seconds and speed of the run that made a model; empty for any other folder."""
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
            "baseline": settings.get("baseline"),
        },
        "tokens": tokens,
        "seed": settings["seed"],
        "seconds": seconds,
        "tokens_per_second": speeds,
        "held_out": {stage: {k: v for k, v in row.items() if k.startswith("held_out.")} for stage, row in last.items()},
    }


def _without_folders(data: dict[str, Any]) -> dict[str, Any]:
    """The data settings with names of files alone: where they lay says nothing to a reader."""
    sources = [{**source, "path": source["path"] and Path(source["path"]).name} for source in data["sources"]]
    names = [Path(name).name for name in data["decontaminate"]]
    return {**{key: value for key, value in data.items() if key != "cache"}, "sources": sources, "decontaminate": names}


if __name__ == "__main__":
    typer.run(main)
