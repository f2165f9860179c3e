"""Rows of models with states beside windows: distance from the teacher by length, and facts found again.

Command: `python -m measuring.study.state_rows ARRAYS OUT --teacher FOLDER --model NAME=FOLDER ...`. A row has

- run, product, budget_mb, tokens (of training), seed, bits, command;
- mb_2k, mb_32k: MB of one sequence of so many tokens, by its layout, of a model that runs in bfloat16;
- kl_1k, kl_4k, kl_8k: KL from the teacher in nats on texts of so many tokens, and kl_8k_last_quarter on the last 2,048
  tokens of the 8k texts;
- needles_2k, needles_8k, prose_2k, prose_4k: facts found again, in percent;
- with `--tasks`, the columns of `--column` (`task_suites.py`), in percent;
- stderr: the standard errors of these.

The outcomes of single texts and probes are kept beside the rows (`items.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.data import with_prefix
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Measured, Settings, Text, measure
from deltanet_hf.evaluation.report.model_rows import named
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.prose_facts import prose_facts
from deltanet_hf.evaluation.tasks.recall_tasks import needles
from deltanet_hf.evaluation.tasks.text_windows import token_ids, windows
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits, stored_bytes
from measuring.rows import RowFile
from measuring.study.items import save_items
from measuring.study.model_facts import load_for_measure, run_facts
from measuring.study.provenance import commands, flags
from measuring.study.task_suites import TaskSuites

# Text -> array, tokens per window, largest number of windows, which are spread over the array.
TEXTS = {"1k": ("heldwiki", 1024, 128), "4k": ("novels", 4096, 32), "8k": ("novels", 8192, 16)}
HAYSTACK = "novels"
# Column -> tokens, largest number of probes.
NEEDLES = {"needles_2k": (2048, 128), "needles_8k": (8192, 32)}
PROSE = {"prose_2k": (2048, 96), "prose_4k": (4096, 48)}
FACTS = (*NEEDLES, *PROSE)


def state_settings(
    arrays: Path, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> Settings:
    """The texts and probes on which models are measured beside a teacher.

    Args:
        arrays: folder with heldwiki.npy and novels.npy (token ids).
        limit: largest number of texts of a length and of probes of a kind; None for no limit.

    Raises UserError for an array that is missing, of another tokenizer, or too short for two texts of a length.
    """
    needed: dict[str, int] = {}  # two windows of the longest, as one has no error
    for array, size, _ in TEXTS.values():
        needed[array] = max(needed.get(array, 0), 2 * size)
    tokens = {name: token_ids(arrays / f"{name}.npy", tokenizer, least, least) for name, least in needed.items()}
    texts = {}
    for text, (array, size, count) in TEXTS.items():
        cut = windows(tokens[array], size, min(count, limit or count), spread=True)
        texts[text] = Text(with_prefix(cut, tokenizer), size - 1, parts={f"last_quarter_{text}": _last(cut, size // 4)})
    haystack = Haystack(tokenizer, tokens[HAYSTACK])
    probes = {}
    for name, (size, count) in NEEDLES.items():
        probes[name] = needles(tokenizer, haystack.ids, size, min(count, limit or count))
    for name, (size, count) in PROSE.items():
        probes[name] = prose_facts(tokenizer, haystack, size, min(count, limit or count))
    return Settings(texts, teacher, probes)


def _last(windows_NT: Tensor, tokens: int) -> np.ndarray:
    """The last tokens of windows, among all but the first [N, T - 1] bool."""
    count, length = windows_NT.shape
    return np.broadcast_to(np.arange(1, length) >= length - tokens, (count, length - 1))


def columns(measured: Measured, shares: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that are measured; `shares` are those in percent."""
    found = {f"kl_{text}": measured.clusters[f"kl_{text}"].score for text in TEXTS}
    found["kl_8k_last_quarter"] = measured.clusters["last_quarter_8k_kl"].score
    row = {name: round(score.value, 5) for name, score in found.items()}
    stderr = {name: round(score.stderr, 5) for name, score in found.items()}
    for name in shares:
        score = measured.clusters[name].score
        row[name], stderr[name] = round(100 * score.value, 1), round(100 * score.stderr, 1)
    return row | {"stderr": stderr}


def main(
    arrays: Annotated[Path, typer.Argument(help="Folder of the token arrays.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which rows are added.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    model: Annotated[list[str], typer.Option(help="NAME=FOLDER of a converted model, or of the teacher; repeatable.")],
    product: Annotated[str, typer.Option(help="What the models are, in words.")] = "",
    budget: Annotated[float | None, typer.Option(help="MB at 2,048 tokens that the models were planned for.")] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of the caches.", show_default="the model's own")] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Largest number of texts and of probes of a kind.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Folder of NAME/SPLIT.jsonl.gz files, for --column.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="A suite to measure, such as humaneval, mbpp or gsm8k; repeatable.")
    ] = None,
) -> None:
    """Measure converted models; add one row for each to a results file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded: Any = load_for_measure(teacher, device)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    settings, asked = state_settings(arrays, loaded, tokenizer, limit), column or []
    longest = int(loaded.config.max_position_embeddings)
    suites = TaskSuites(tasks, teacher, tokenizer, longest, limit, asked) if tasks else None
    if missing := suites.missing if suites else dict.fromkeys(asked, "needs --tasks"):
        raise UserError("; ".join(f"--column {name}: {reason}" for name, reason in missing.items()))
    common = [str(arrays), out.name, *flags(teacher=Path(teacher).name, limit=limit, tasks=tasks)]
    common += [f"--column={name}" for name in asked]
    for entry in model:
        name, folder = named(entry)
        student: Any = load_for_measure(folder, device)
        if bits is not None:
            set_cache_bits(student, bits)
        width, run = cache_bits_of(student), run_facts(Path(folder))
        row: dict[str, Any] = {"run": name, "product": product, "budget_mb": budget, "bits": width}
        sizes = {f"mb_{at}k": stored_bytes(student, at * 1024, width, torch.bfloat16) for at in (2, 32)}
        row |= {column: round(size / 1e6, 3) for column, size in sizes.items()}
        measured = measure(student, settings)
        if suites is not None:
            measured.clusters.update(suites(student))
        row |= {"tokens": run.get("tokens", 0), "seed": run.get("seed"), **columns(measured, (*FACTS, *asked))}
        words = [*common, *flags(model=f"{name}=FOLDER", product=product or None, budget=budget, bits=bits)]
        row["command"] = commands(Path(folder), "measuring.study.state_rows", words)
        RowFile(out).add(row)
        save_items(out, name, measured)
        typer.echo(f"{name}: " + "  ".join(f"{key} {row[key]}" for key in ("mb_2k", *row["stderr"])))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
