"""Rows of students with different mixers by one set of figures, `python -m measuring.study.mixer_row ARRAYS OUT ...`.

A row of the results file has, with the standard error NAME_se beside each measured quality:

- mixer, set: the kind of the converted layers ("softmax" for the teacher) and its settings that are not the recommended
  ones; kept: indices of the layers with the teacher's attention; tokens, seed, rate (of the new layers): of the
  training;
- kl: KL(teacher || model) in nats per token on held-out Wikipedia; heldwiki, wt2: perplexity there and on WikiText-2;
  repeat: perplexity of the second copy of a passage of 256 tokens;
- needles_1k, pairs_8: exact answers in per cent (`recall_cells.py`);
- train_tokens_per_s: median speed of the last training stage;
- decode_ms: milliseconds per token at batch size 1 behind a prompt of 2,048 tokens;
- state_mb: MB that a sequence of 2,048 tokens takes, measured on the cache;
- command: how the model was made, by the records in its folder, and measured.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel

from deltanet_hf.evaluation.measures.measure import Settings, Text, measure, repeated
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.measures.speed import measure_speed
from deltanet_hf.evaluation.measures.text_scores import Forward
from deltanet_hf.evaluation.tasks.text_windows import windows
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.layers import SOFTMAX
from measuring.rows import RowFile
from measuring.study.hybrid_row import layer_facts
from measuring.study.model_facts import changed_settings, load_for_measure, run_facts
from measuring.study.provenance import commands, flags
from measuring.study.recall_cells import recall_cells

LENGTH = 2048  # tokens of the prompt behind which decoding is timed, and whose bytes are given
HAYSTACK = "novels"
CELLS = ("needles_1k", "pairs_8")
TEXTS = ("wt2", "heldwiki")  # arrays
COMPARED = "heldwiki"  # the array that the teacher reads, too, and whose segments are repeated
TEXT_WINDOW = 1024  # tokens per window of a text
SEGMENT = 256  # tokens per segment of the exact repeat
MOST = 64  # windows of a text, and segments
PERPLEXITIES = (*TEXTS, "repeat")


def text_settings(arrays: Path, teacher: Forward, probes: dict[str, list[Probe]], limit: int | None = None) -> Settings:
    """What is measured beside a teacher.

    Args:
        arrays: folder with wt2.npy and heldwiki.npy (token ids).
        limit: largest number of windows and segments of each array; None for no limit.
    """
    tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name in TEXTS}
    count = min(MOST, limit or MOST)
    texts = {name: Text(windows(tokens[name], TEXT_WINDOW, count), compared=name == COMPARED) for name in TEXTS}
    texts["repeat"] = repeated(windows(tokens[COMPARED], SEGMENT, count))
    return Settings(texts, teacher, probes)


class MixerMeasure:
    """Measures models against one teacher.

    Args:
        arrays: folder with the arrays of `text_settings` and novels.npy (token ids).
        limit: largest number of windows per text and of probes per cell; None for no limit.
    """

    def __init__(self, arrays: Path, teacher: Any, tokenizer: Any, limit: int | None = None) -> None:
        haystack = np.load(arrays / f"{HAYSTACK}.npy").astype(np.int64)
        self.longest = int(teacher.config.get_text_config().max_position_embeddings)
        probes = recall_cells(tokenizer, haystack, self.longest, CELLS, limit)
        self.settings = text_settings(arrays, teacher, probes, limit)

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        """The measured keys of a row."""
        clusters = measure(model, self.settings).clusters
        found = {"kl": clusters["kl_heldwiki"].score}
        found |= {name: clusters[f"loss_{name}"].perplexity for name in PERPLEXITIES}
        row: dict[str, Any] = {}
        for name, score in found.items():
            row[name], row[f"{name}_se"] = round(score.value, 5), round(score.stderr, 5)
        for name in self.settings.probes:
            score = clusters[name].score
            row[name], row[f"{name}_se"] = round(100 * score.value, 3), round(100 * score.stderr, 3)
        speed = measure_speed(model, min(LENGTH, self.longest // 2))
        row["decode_ms"] = round(1000 / speed.decode_tokens_per_second, 3)
        row["state_mb"] = round(speed.cache_bytes / 1e6, 3)
        return row


def make_row(name: str, folder: Path, model: Any, measure: MixerMeasure) -> dict[str, Any]:
    """The row of a model that was loaded from `folder`."""
    facts, trained = layer_facts(model), run_facts(folder)
    kinds = [kind for kind in facts["kinds"] if kind != SOFTMAX]
    row = {"run": name, "mixer": ", ".join(kinds) or SOFTMAX, "kept": facts["kept"]}
    row["set"] = changed_settings(folder)
    row |= {"tokens": trained.get("tokens", 0), "seed": trained.get("seed")}
    if trained:
        row["rate"], row["train_tokens_per_s"] = trained["rate"], round(trained["tokens_per_second"])
    return {**row, **measure(model)}


def shown(row: dict[str, Any]) -> str:
    """The figures of a row in one line."""
    names = ("kl", *PERPLEXITIES, *CELLS, "train_tokens_per_s", "decode_ms", "state_mb")
    return "  ".join(f"{name} {row[name]:.4g}" for name in names if name in row)


def main(
    arrays: Annotated[Path, typer.Argument(help="Folder of the token arrays.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which rows are added.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    model: Annotated[list[str], typer.Option(help="NAME=FOLDER of a model to measure; repeatable.")],
    limit: Annotated[
        int | None, typer.Option(min=2, help="Largest number of windows per text and of probes per cell.")
    ] = None,
) -> None:
    """Measure models, and add one row per model to a results file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = load_for_measure(teacher, device)
    measured = MixerMeasure(arrays, loaded, AutoTokenizer.from_pretrained(teacher), limit)
    common = [str(arrays), out.name, *flags(teacher=Path(teacher).name, limit=limit)]
    for entry in model:
        began = time.perf_counter()
        name, _, folder = entry.partition("=")
        row = make_row(name, Path(folder), load_for_measure(folder, device), measured)
        words = [*common, *flags(model=f"{name}=FOLDER")]
        row["command"] = commands(Path(folder), "measuring.study.mixer_row", words)
        RowFile(out).add(row)
        typer.echo(f"{name}: {shown(row)} ({time.perf_counter() - began:.1f} s)")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
