"""Measures the front of bytes against quality: teacher, baselines without training, trained controls and students.

Command: `python -m measuring.study.front ARRAYS OUT --teacher FOLDER ...`.

Every row of the results file is one model in a cache of one number of bits:

- run, kind (teacher, free: a baseline without training, control, student), bits, kept (layers whose softmax attention
  sees all tokens), kept_heads, window, tokens (of training), seed;
- mb_2k, mb_8k, mb_32k: MB of one sequence of so many tokens (`deltanet_hf.models.cache_bits.stored_bytes`);
- the columns of `hybrid_row.py` and, with `--tasks`, of `task_suites.py` with their standard errors, and `missing`:
  task column without a value -> what it lacks;
- tokens_per_s, with `--tasks` on a GPU: decoding of one sequence after 2,048 tokens, by CUDA graph;
- command: how the model was made, by the records in its folder, and measured.

The outcomes of single windows and probes are kept in a file named after OUT (`OUT-items.json.xz`), so that every
comparison can be made again.
"""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel

from deltanet_convert.select import read_selection
from deltanet_hf.decoding.served import serve
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.decoding_mode import GRAPH
from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.training_free import SINKS, WindowPolicy, longest_window
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import set_cache_bits, stored_bytes
from deltanet_hf.models.layers import LayerTable
from measuring.benchmarks.model_at_points import ModelAtPoints
from measuring.rows import RowFile
from measuring.study.hybrid_measure import HybridMeasure
from measuring.study.hybrid_row import figures, layer_facts, shown
from measuring.study.model_facts import load_for_measure, run_facts
from measuring.study.provenance import commands, flags
from measuring.study.shared_figures import SharedFigures
from measuring.study.task_suites import TaskSuites

LENGTHS = {"mb_2k": 2048, "mb_8k": 8192, "mb_32k": 32768}
DECODED = 1, LENGTHS["mb_2k"]  # sequences and tokens before the steps that are timed


def parse_policy(text: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int, int, int]:
    """Reads KEPT@BITS@BYTES[@TOKENS]: kept layers and LAYER.HEAD heads by commas (or `none`), bits, bytes at so many
    tokens (2,048)."""
    try:
        kept, bits, size, *tokens = text.split("@")
        (length,) = map(int, tokens or (LENGTHS["mb_2k"],))
        parts = [] if kept == "none" else kept.split(",")
        layers = tuple(sorted(int(part) for part in parts if "." not in part))
        heads = tuple(sorted((int(a), int(b)) for a, b in (part.split(".") for part in parts if "." in part)))
        return layers, heads, int(bits), int(float(size)), length
    except ValueError:
        raise UserError(f"--policy {text}: expected KEPT@BITS@BYTES[@TOKENS], such as 7,8,17@4@9.2e6") from None


def _items(results: Path) -> RowFile:
    """The outcomes of the rows' windows and probes."""
    head = {"clusters": "name: sums, numbers of items"}
    return RowFile(results.with_name(f"{results.stem}-items.json.xz"), head=head)


def save_items(results: Path, run: str, measured: Measured) -> None:
    """Keep the outcomes of a row's windows and probes, to five digits."""
    rounded = {name: Clusters(part.sums.round(5), part.sizes) for name, part in measured.clusters.items()}
    _items(results).add({"run": run, **Measured(measured.bytes, rounded).to_dict()})


def load_items(results: Path) -> dict[str, Measured]:
    """Run -> what `save_items` kept of it."""
    return {row["run"]: Measured.from_dict(row) for row in _items(results).rows()}


def main(
    arrays: Annotated[Path, typer.Argument(help="Folder of the token arrays.")],
    out: Annotated[Path, typer.Argument(help="JSON file to which rows are added.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    teacher_bits: Annotated[list[int] | None, typer.Option(help="Measure the teacher in this many bits.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="KEPT@BITS@BYTES[@TOKENS]: the teacher, untrained, with these layers whole and windows elsewhere that "
            "fit the bytes of a sequence of so many tokens (2,048)."
        ),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of `deltanet-hf select` for a budget in bytes: the teacher, untrained, by this plan, and with "
            "windows alone that fit the same budget."
        ),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER of a converted model; repeatable.")] = None,
    bits: Annotated[
        list[int] | None, typer.Option(help="Bits of the models' caches; repeatable. Default: 16, 4.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=2, help="Largest number of windows per text and of probes per cell.")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Folder of NAME/SPLIT.jsonl.gz files: measure the suites that papers report, too."),
    ] = None,
) -> None:
    """Measure a teacher, baselines without training and converted models; add one row for each to a results file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    loaded: Any = load_for_measure(teacher, device)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    measure = HybridMeasure(arrays, loaded, tokenizer, limit)
    references = SharedFigures(out.parent / "references", measure)
    typer.echo(f"teacher and control: {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    longest = int(loaded.config.get_text_config().max_position_embeddings)
    suites = TaskSuites(tasks, teacher, tokenizer, longest, limit) if tasks else None
    if suites is not None:
        typer.echo(f"texts of the suites: {time.perf_counter() - began:.1f} s; without: {suites.missing or 'nothing'}")

    common = [str(arrays), out.name, *flags(teacher=Path(teacher).name, limit=limit, tasks=tasks)]

    def command(folder: str, **options: Any) -> dict[str, str]:
        words = [*common, *flags(**options)]
        return {"command": commands(Path(folder), "measuring.study.front", words)}

    def add(run: str, kind: str, of: PreTrainedModel, width: int, facts: dict[str, Any]) -> None:
        start = time.perf_counter()
        set_cache_bits(of, width)
        measured = measure(of)
        if suites is not None:
            measured.clusters.update(suites(of))
            facts = facts | {"missing": suites.missing} | dict.fromkeys(suites.missing)
            if device.type == "cuda":
                timed = ModelAtPoints(serve(deepcopy(of)), {}).measure(GRAPH, DECODED)
                facts["tokens_per_s"] = round(1000 / timed["decode_ms"])
        row = {"run": run, "kind": kind, "bits": width, **facts}
        row |= {name: round(stored_bytes(of, count, width) / 1e6, 3) for name, count in LENGTHS.items()}
        row |= {name: value for name, value in figures(measured, references).items() if name not in LENGTHS}
        RowFile(out).add(row)
        save_items(out, run, measured)
        typer.echo(f"{run}: {shown(row)} ({time.perf_counter() - start:.1f} s)")

    def add_policy(run: str, policy: WindowPolicy, width: int, made: dict[str, Any]) -> None:
        facts: dict[str, Any] = {"kept": list(policy.kept), "window": policy.window, "sinks": SINKS, "tokens": 0}
        facts |= {"kept_heads": [list(head) for head in policy.heads]} if policy.heads else {}
        facts |= {"windows": list(policy.windows)} if policy.windows else {}
        add(run, "free", policy.apply(loaded), width, facts | made)

    copied: Any = load_for_measure(teacher, device) if teacher_bits else None
    for width in teacher_bits or ():
        add(f"teacher@{width}", "teacher", copied, width, {"tokens": 0} | command(teacher, teacher_bits=width))
    for text in policy or ():
        layers, heads, width, budget, length = parse_policy(text)
        window = longest_window(loaded, layers, budget, length, width, heads)
        if window is None:
            typer.echo(f"{text}: a window of one token already needs more")
            continue
        add_policy(f"free-{text}", WindowPolicy(layers, window, heads=heads), width, command(teacher, policy=text))
    for file in plan or ():
        chosen = read_selection(file)
        if chosen.planned_windows is None:
            raise UserError(f"--plan {file}: plans no windows; deltanet-hf select does with --keep 5.4MB@2k")
        windows, width = chosen.planned_windows, chosen.settings["cache_bits"]
        alone = chosen.scores["allocations"][0]["windows"][0]
        made = command(teacher, plan=file.name)
        planned = WindowPolicy((), max(windows), heads=chosen.heads, windows=windows)
        add_policy(f"plan-{chosen.budget}", planned, width, made)
        add_policy(f"windows-{chosen.budget}", WindowPolicy(chosen.local, alone), width, made)
    for entry in model or ():
        name, _, folder = entry.partition("=")
        student: Any = load_for_measure(folder, device)
        run, facts = run_facts(Path(folder)), layer_facts(student)
        trained = {"tokens": run.get("tokens", 0), "seed": run.get("seed")}
        states = any(kind.recurrent is not None for kind in LayerTable.of(student.config).converted.values())
        kind = ("student" if states else "control") if trained["tokens"] else "free"
        for width in bits or (16, 4):
            made = command(folder, model=f"{name}=FOLDER", bits=width)
            add(f"{name}@{width}", kind, student, width, facts | trained | made)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
