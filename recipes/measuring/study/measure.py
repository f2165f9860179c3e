"""Measures models beside their teacher: `python -m measuring.study.measure texts|recall|mixers ARRAYS OUT ...`.

What is measured, with the columns of a row: `texts` in results_row.py, `recall` in hybrid_row.py, `mixers` in
mixer_row.py. Every row has `command`: how the model was made, by the records in its folder, and measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import set_cache_bits
from measuring.rows import Row, RowFile
from measuring.study import hybrid_row, mixer_row, results_row
from measuring.study.hybrid_measure import HybridMeasure
from measuring.study.mixer_row import MixerMeasure
from measuring.study.provenance import commands, flags
from measuring.study.results_row import load_for_measure, text_settings
from measuring.study.shared_figures import SharedFigures

SHOWN = {"texts": results_row.shown, "recall": hybrid_row.shown, "mixers": mixer_row.shown}
"""Kind of measure -> the figures of a row in one line."""


def main(
    kind: Annotated[str, typer.Argument(help="texts, recall or mixers: what is measured.")],
    arrays: Annotated[Path, typer.Argument(help="Folder of the token arrays.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which rows are added.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    model: Annotated[list[str], typer.Option(help="NAME=FOLDER of a model to measure; repeatable.")],
    limit: Annotated[
        int | None, typer.Option(min=2, help="Largest number of windows per text and of probes per cell.")
    ] = None,
    window: Annotated[
        bool, typer.Option("--window", help="Restrict the models to the last 64 and first 4 tokens, without training.")
    ] = False,
    free: Annotated[bool, typer.Option(help="recall: untrained baselines with the bytes of each model.")] = True,
    cache_bits: Annotated[int | None, typer.Option(help="Keep the models' keys and values in 8 or 4 bits.")] = None,
    references: Annotated[
        Path | None, typer.Option(help="recall: folder of figures that runs share. Default: `references` beside OUT.")
    ] = None,
) -> None:
    """Measure models, and add one row per model to a results file."""
    if kind not in SHOWN:
        raise UserError(f"{kind}: expected one of {', '.join(SHOWN)}")
    if kind != "recall" and (not free or references is not None):
        raise UserError(f"--no-free, --references: only recall has them, and {kind} is measured")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = load_for_measure(teacher, device)
    make_row = row_maker(kind, arrays, loaded, limit, free, references or out.parent / "references", teacher)
    common = [kind, str(arrays), out.name, *flags(teacher=Path(teacher).name, limit=limit)]
    for entry in model:
        began = time.perf_counter()
        name, _, folder = entry.partition("=")
        measured: Any = load_for_measure(folder, device, window)
        if cache_bits is not None:
            set_cache_bits(measured, cache_bits)
        row = make_row(name, Path(folder), measured)
        words = [*common, *flags(model=f"{name}=FOLDER", window=window, no_free=not free, cache_bits=cache_bits)]
        row["command"] = commands(Path(folder), "measuring.study.measure", words)
        row |= {} if cache_bits is None else {"cache_bits": cache_bits}
        RowFile(out).add(row)
        typer.echo(f"{name}: {SHOWN[kind](row)} ({time.perf_counter() - began:.1f} s)")


def row_maker(
    kind: str,
    arrays: Path,
    loaded: Any,
    limit: int | None,
    free: bool,
    references: Path,
    teacher: str,
) -> Callable[[str, Path, Any], Row]:
    """A function of (name, folder, model) for one kind of measure; `loaded` is the teacher."""
    if kind == "texts":
        texts = text_settings(arrays, loaded, limit)
        return lambda name, folder, model: results_row.make_row(name, folder, model, texts)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    if kind == "mixers":
        mixers = MixerMeasure(arrays, loaded, tokenizer, limit)
        return lambda name, folder, model: mixer_row.make_row(name, folder, model, mixers)
    shared = SharedFigures(references, HybridMeasure(arrays, loaded, tokenizer, limit))
    return lambda name, folder, model: hybrid_row.make_row(name, folder, model, shared, free)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
