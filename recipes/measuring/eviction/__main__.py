"""Trains gates on a token array and measures them: `python -m measuring.eviction ARRAYS OUT --teacher FOLDER ...`.

The row has the columns of `measuring.study.state_rows`, whose rows it is compared with; beside them

- kind: eviction; kept_heads: the heads with gates, null for all; window: tokens that these see in any case;
- adapters: the rate of adapters on attention, null where the teacher's weights are frozen;
- share_target, share: of older tokens that the gates were to keep, and keep in the texts that are measured. mb_2k
  and mb_32k are the bytes of what is kept, with as many tokens in each such head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from deltanet_convert.select import read_selection
from deltanet_convert.select.budget import Budget
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import measure
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import stored_bytes
from deltanet_recipes.schema import Long
from deltanet_recipes.schema_sections import Optimizer
from measuring.eviction.gates import BITS, WINDOW, Gates, Heads
from measuring.eviction.training import train_gates
from measuring.rows import RowFile
from measuring.study.items import save_items
from measuring.study.model_facts import load_for_measure
from measuring.study.state_rows import FACTS, columns, state_settings


def share_of(keep: str, heads: Heads, teacher: PreTrainedModel) -> float:
    """The share of older tokens that `--keep` means: itself, or what the bytes leave that it allows."""
    budget = Budget.parse(keep)
    if budget.kind == "count":
        raise UserError(f"--keep {keep}: expected a share of older tokens such as 25%, or bytes such as 5.3MB@2k")
    if budget.at is None:
        return budget.amount
    whole = stored_bytes(teacher, budget.at, 16) if budget.kind == "share" else 1
    return heads.share(int(budget.amount * whole), budget.at)


def training_rows(text: Path, stage: Long, seed: int) -> Tensor:
    """Rows [N, T] int64 of a token array, each token once, in random order; UserError if it is too short."""
    ids = np.load(text, mmap_mode="r")
    count = stage.steps * stage.batch_tokens
    if ids.size < count:
        raise UserError(f"--text {text}: has {ids.size:,} tokens, and {count:,} are trained on; lower --tokens")
    rows = np.asarray(ids[:count], dtype=np.int64).reshape(-1, stage.sequence_length)
    return torch.from_numpy(np.random.default_rng(seed).permutation(rows))


@torch.inference_mode()
def kept_share(model: Any, gates: Gates, windows: Tensor) -> float:
    """The mean share of tokens that the gates keep in windows [N, T]."""
    shares = []
    for window in windows.split(1):
        model.model(window, use_cache=False)
        shares.append(gates.kept.item())
    return float(np.mean(shares))


def main(
    arrays: Annotated[Path, typer.Argument(help="Folder of the token arrays that are measured.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which the row is added.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    text: Annotated[Path, typer.Option(help=".npy file with token ids to train on.")],
    keep: Annotated[str, typer.Option(help="Bytes such as 5.3MB@2k or 5%@32k, or a share of older tokens: 25%.")],
    plan: Annotated[
        Path | None,
        typer.Option(help="File of `deltanet-hf select` for bytes: gates in its whole heads alone, windows elsewhere."),
    ] = None,
    adapters: Annotated[
        float | None, typer.Option(help="Train adapters on attention too, at this rate (SmolLM2-135M: 6e-4).")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to train on.")] = 9_879_552,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 4096,
    batch: Annotated[int, typer.Option(help="Tokens of a step.")] = 8192,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Largest number of windows per text and of probes per cell.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Order of the rows, noise of the gates, adapters.")] = 0,
) -> None:
    """Train gates that evict tokens, measure the model, and add its row to a results file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole: Any = load_for_measure(teacher, device)
    student: Any = load_for_measure(teacher, device)
    chosen = None if plan is None else read_selection(plan)
    if chosen is not None and chosen.planned_windows is None:
        raise UserError(f"--plan {plan}: plans no windows; deltanet-hf select does with --keep 5.4MB@2k")
    heads = Heads.of(student.config, *(() if chosen is None else (chosen.heads, chosen.planned_windows)))
    share = share_of(keep, heads, whole)
    optimizer = Optimizer(name="muon", rest_lr=adapters or 0.0)
    stage = Long(
        tokens=tokens,
        sequence_length=length,
        batch_tokens=batch,
        train="frozen" if adapters is None else "lora",
        lora_targets="attention",
        optimizer=optimizer,
    )
    rows = training_rows(text, stage, seed)
    settings = state_settings(arrays, whole, AutoTokenizer.from_pretrained(teacher), limit)
    gates = Gates(student, heads)
    train_gates(whole, student, gates, rows, stage, share, seed, typer.echo)
    measured = measure(student, settings)
    held = kept_share(student, gates, settings.texts["4k"].windows.to(device))
    parts = ["eviction", keep, *(["plan"] if plan else []), *(["lora"] if adapters else []), f"seed{seed}" * (seed > 0)]
    row: dict[str, Any] = {"run": "-".join(filter(None, parts)), "kind": "eviction", "bits": BITS, "window": WINDOW}
    row |= {"kept_heads": None if chosen is None else [list(head) for head in chosen.heads], "adapters": adapters}
    row |= {"tokens": tokens, "seed": seed, "share_target": round(share, 5), "share": round(held, 5)}
    row |= {f"mb_{at}k": round(heads.bytes(at * 1024, held) / 1e6, 3) for at in (2, 32)}
    row |= columns(measured, FACTS)
    RowFile(out).add(row)
    save_items(out, row["run"], measured)
    typer.echo(f"{row['run']}: " + "  ".join(f"{key} {row[key]}" for key in ("mb_2k", *row["stderr"])))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
