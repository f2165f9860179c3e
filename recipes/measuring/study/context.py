"""Measures how far a teacher reads, and how far it does once converted, without training unless models are given.

    deltanet-hf convert TEACHER CONVERTED --context 32k
    python -m measuring.study.context TEACHER CONVERTED arrays/reported/novels.npy \
        recipes/results/smollm2-135m-context.json

The rows: the teacher, the teacher by YaRN, the conversion with the teacher's positions and with each kind of positions
beyond, and models of `--model`. Of each, at a quarter, half and all of the tokens that the conversion reads: needles
found (`far_needles.py`), and the nats of the same 2,048 tokens of novels at the end of texts of these lengths. Minutes
on a GPU, in bfloat16; models keep keys and values in their own bits.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.data import with_prefix
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Settings, Text, measure
from deltanet_hf.evaluation.report.model_rows import named
from deltanet_hf.exit_codes import run_command
from deltanet_hf.hub import loadable_folder
from deltanet_hf.loading import chosen_device, load_config, load_model, load_tokenizer
from deltanet_hf.models.cache_bits import cache_bits_of, stored_bytes
from deltanet_hf.models.far_positions import PositionKind, yarn_config
from measuring.rows import Row, RowFile, fill, machine
from measuring.study.far_needles import KINDS
from measuring.study.provenance import flags

SCORED = 2048  # tokens at the end of a text whose nats are measured
TEXTS, PROBES = 8, 20  # of each length
Maker = Callable[[], PreTrainedModel]


def far_settings(
    tokenizer: PreTrainedTokenizerBase, novels: np.ndarray, longest: int, limit: int | None = None
) -> Settings:
    """The texts and probes of a quarter, half and all of `longest` tokens.

    Args:
        novels: token ids [n] of running text.
        limit: number of texts and of probes of a kind; None for `TEXTS` and `PROBES`.
    """
    if novels.size < longest:
        raise UserError(f"novels: got {novels.size:,} tokens, a text takes {longest:,}; give a longer array")
    ends = np.linspace(longest, novels.size, limit or TEXTS).astype(int)
    texts, probes = {}, {}
    for length in (longest // 4, longest // 2, longest):
        cut = torch.from_numpy(np.stack([novels[end - length : end] for end in ends]))
        texts[_short(length)] = Text(with_prefix(cut, tokenizer), SCORED)
        for name, kind in KINDS.items():
            probes[f"{name}_{_short(length)}"] = kind.probes(tokenizer, novels, length, limit or PROBES)
    return Settings(texts, probes=probes)


def far_row(model: PreTrainedModel, settings: Settings, longest: int) -> Row:
    """Shares of numbers that are found, and nats per token; the bytes of a sequence of `longest` tokens."""
    measured = measure(model, settings)
    found = {name: round(measured.clusters[name].mean, 3) for name in measured.probes}
    nats = {f"nats_{name}": round(measured.clusters[f"loss_{name}"].mean, 4) for name in settings.texts}
    size = stored_bytes(model, longest, cache_bits_of(model), torch.bfloat16)
    return {**found, **nats, f"MB_{_short(longest)}": round(size / 1e6, 1)}


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def main(
    teacher: Annotated[str, typer.Argument(help="Softmax model: a folder or a Hub id.")],
    converted: Annotated[Path, typer.Argument(help="Folder that `convert --context` made of it.")],
    novels: Annotated[Path, typer.Argument(help=".npy file of token ids, a text of 33k tokens or more.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which rows are added; it keeps those that it has.")],
    model: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of a trained model; repeatable.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Number of texts and of probes of a kind; default 8 and 20.")
    ] = None,
) -> None:
    """Measure a teacher, its untrained conversions and trained models beyond its positions."""
    began, device = time.perf_counter(), chosen_device(None)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    own = loadable_folder(teacher)
    longest = int(load_config("converted", converted).max_position_embeddings)  # type: ignore[attr-defined]
    makers = {**_teachers(teacher, own, longest, dtype), **_students(converted, dtype)}
    for name, trained in map(named, model or ()):
        makers[name] = partial(load_model, name, Path(trained), dtype)
    settings = far_settings(load_tokenizer(teacher, own), np.load(novels).astype(np.int64), longest, limit)

    def row(labels: Row) -> Row:
        return far_row(makers[labels["model"]]().to(device), settings, longest)  # type: ignore[arg-type]

    words = [Path(teacher).name, converted.name, novels.name, out.name, *flags(limit=limit)]
    words += [f"--model={named(entry)[0]}=FOLDER" for entry in model or ()]
    head = {
        "command": shlex.join(["python", "-m", "measuring.study.context", *words]),
        **machine("transformers", "triton"),
        "probes": limit or PROBES,
        "texts": limit or TEXTS,
        "scored_tokens": SCORED,
    }
    fill(RowFile(out, ("model",), head), ({"model": name} for name in makers), row)
    typer.echo(f"{out}: {time.perf_counter() - began:.0f} s")


def _teachers(name: str, folder: Path, longest: int, dtype: torch.dtype) -> dict[str, Maker]:
    """The teacher as it is and by YaRN."""
    config = load_config(name, folder)
    further = yarn_config(config, int(config.max_position_embeddings), longest)  # type: ignore[attr-defined]
    load = partial(load_model, name, folder, dtype)
    return {"teacher": load, "teacher, YaRN": partial(load, config=further)}


def _students(folder: Path, dtype: torch.dtype) -> dict[str, Maker]:
    """The conversion in a folder, which has positions beyond, with those of the teacher and with every kind."""
    made: dict[str, Maker] = {}
    for kind in (None, *get_args(PositionKind)):
        config: Any = load_config("converted", folder)
        positions = config.deltanet.pop("positions")
        if kind == "cut":
            config.deltanet.pop("cache_bits")  # its keys have 16 bits
        if kind is not None:
            config.deltanet = config.deltanet | {"positions": positions | {"kind": kind}}
        made[f"converted, {kind or 'as it is'}"] = partial(load_model, "converted", folder, dtype, config=config)
    return made


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
