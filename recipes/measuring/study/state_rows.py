"""Rows of models with states beside windows: distance from the teacher by length, and facts found again.

Command: `python -m measuring.study.state_rows ARRAYS OUT --teacher FOLDER --model NAME=FOLDER ...`. A row has

- run, product, budget_mb, tokens (of training), seed, bits, command;
- mb_2k, mb_32k: MB of one sequence of so many tokens, by its layout;
- kl_1k, kl_4k, kl_8k: KL from the teacher in nats on texts of so many tokens, and kl_8k_last_quarter on the last 2,048
  tokens of the 8k texts;
- needles_2k, needles_8k, prose_2k, prose_4k: facts found again, in percent;
- stderr: the standard errors of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.evaluation.measures.probes import answer_outcomes
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits, stored_bytes
from measuring.rows import RowFile
from measuring.study.hybrid_measure import HAYSTACK, TEXTS, text_windows
from measuring.study.made_by import commands, flags
from measuring.study.recall_cells import recall_cells
from measuring.study.results_row import load_for_measure, run_facts
from measuring.study.token_measures import token_measures

KL = ("1k", "4k", "8k")  # names in `TEXTS`
QUARTER = 2048  # tokens at the end of a text of 8k
FACTS = ("needles_2k", "needles_8k", "prose_2k", "prose_4k")
TOKENS_AT_ONCE = {"cuda": 16384, "cpu": 2048}


class StateMeasure:
    """Measures models against one teacher.

    Args:
        arrays: folder with heldwiki.npy and novels.npy (token ids).
        limit: largest number of texts of a length and of probes of a kind; None for no limit.
    """

    def __init__(
        self, arrays: Path, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None
    ) -> None:
        self.teacher, self.prefix = teacher, prefix_ids(tokenizer)
        tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name in {TEXTS[text][0] for text in KL}}
        self.texts = {}
        for text in KL:
            array, size, count = TEXTS[text]
            self.texts[text] = text_windows(tokens[array], size, min(count, limit or count), spread=True).to(
                teacher.device
            )
        probes = recall_cells(tokenizer, tokens[HAYSTACK], int(teacher.config.max_position_embeddings), True, limit)
        self.probes = {name: probes[name] for name in FACTS}

    def __call__(self, model: PreTrainedModel) -> dict[str, Any]:
        """The columns of a row that are measured."""
        found: dict[str, Clusters] = {}
        for text, windows in self.texts.items():
            rows = max(1, TOKENS_AT_ONCE[windows.device.type] // windows.shape[1])
            divergences = token_measures(model, windows, rows, self.teacher, self.prefix).divergences
            assert divergences is not None
            found[f"kl_{text}"] = _of_windows(divergences)
            if text == "8k":
                found["kl_8k_last_quarter"] = _of_windows(divergences[:, -QUARTER:])
        for name, probes in self.probes.items():
            outcomes = answer_outcomes(model, probes)
            found[name] = Clusters.of(100.0 * outcomes.exact, outcomes.owners)
        digits = {name: 1 if name in FACTS else 5 for name in found}
        scores = {name: part.score for name, part in found.items()}
        columns = {name: round(score.value, digits[name]) for name, score in scores.items()}
        return columns | {"stderr": {name: round(score.stderr, digits[name]) for name, score in scores.items()}}


def _of_windows(values: np.ndarray) -> Clusters:
    """Values [N, T] of tokens, a cluster for each of N texts."""
    return Clusters(values.sum(axis=1, dtype=np.float64), np.full(len(values), values.shape[1]))


def main(
    arrays: Annotated[Path, typer.Argument(help="Folder of the token arrays.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which rows are added.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    model: Annotated[list[str], typer.Option(help="NAME=FOLDER of a converted model, or of the teacher; repeatable.")],
    product: Annotated[str, typer.Option(help="What the models are, in words.")] = "",
    budget: Annotated[float | None, typer.Option(help="MB at 2,048 tokens that the models were planned for.")] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of the caches.", show_default="the model's own")] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Largest number of texts and of probes of a kind.")] = None,
) -> None:
    """Measure converted models; add one row for each to a results file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = load_for_measure(teacher, device)
    measure = StateMeasure(arrays, loaded, AutoTokenizer.from_pretrained(teacher), limit)
    common = [str(arrays), out.name, *flags(teacher=Path(teacher).name, limit=limit)]
    for entry in model:
        name, _, folder = entry.partition("=")
        student: Any = load_for_measure(folder, device)
        if bits is not None:
            set_cache_bits(student, bits)
        width, run = cache_bits_of(student), run_facts(Path(folder))
        row: dict[str, Any] = {"run": name, "product": product, "budget_mb": budget, "bits": width}
        row |= {f"mb_{at}k": round(stored_bytes(student, at * 1024, width) / 1e6, 3) for at in (2, 32)}
        row |= {"tokens": run.get("tokens", 0), "seed": run.get("seed"), **measure(student)}
        words = [*common, *flags(model=f"{name}=FOLDER", product=product or None, budget=budget, bits=bits)]
        row["command"] = commands(Path(folder), "measuring.study.state_rows", words)
        RowFile(out).add(row)
        typer.echo(f"{name}: " + "  ".join(f"{key} {row[key]}" for key in ("mb_2k", *row["stderr"])))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
