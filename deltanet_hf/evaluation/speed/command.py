"""The options of `deltanet-hf bench`; torch and transformers are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench_command(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or Hub id of a converted model or of a softmax model.")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="Folder or Hub id of a teacher to compare with.")] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE",
            help="Instead of MODEL, measure models with random weights and the shape 135M, 1B or 8B: a teacher, one "
            "with full attention in every fourth layer, windows elsewhere and 4 bits, and one with windows and states "
            "in 16 bits.",
        ),
    ] = None,
    mixer: Annotated[
        str, typer.Option(help="With --random-weights, the mixer of the converted layers.")
    ] = "gated_deltanet",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="How to decode, repeatable: eager, or graph, which replays a CUDA graph.",
            show_default="graph on a GPU, eager on a CPU, as generate does",
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Length of the prompts in tokens, such as 2k, repeatable.", show_default="2k and 16k"),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size, repeatable.", show_default="1 and 16")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timed runs, whose median is taken.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for bench.json and bench.png.", show_default="print the table only"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights: auto (as saved), float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1.", show_default="a GPU if there is one")
    ] = None,
) -> None:
    """Measure how fast a model reads and decodes, and the size of its cache, with its teacher."""
    from rich.console import Console

    from deltanet_hf.errors import QualityError
    from deltanet_hf.evaluation.speed.bench import Conditions, measure, write_rows
    from deltanet_hf.evaluation.speed.subjects import check_conditions, subjects
    from deltanet_hf.evaluation.speed.views import draw, table
    from deltanet_hf.loading import chosen_device
    from deltanet_hf.safe_write import writing
    from deltanet_hf.token_count import parse_tokens

    contexts = [parse_tokens(length, "--context") for length in context or ("2k", "16k")]
    place = chosen_device(device)
    usual = "eager" if place.type == "cpu" else "graph"
    conditions = Conditions(contexts, batch or [1, 16], mode or [usual], repeats)
    check_conditions(conditions)
    found = subjects(model, teacher, random_weights, mixer, dtype, device)
    if out is not None:
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
    rows = measure(found, conditions, lambda line: typer.echo(line, err=True))
    Console().print(table(rows))
    if out is not None and rows:
        write_rows(out / "bench.json", rows, place, {"repeats": repeats, "dtype": dtype})
        with writing(out):
            draw(rows, out / "bench.png")
        typer.echo(f"Written to {out}")
    if not rows:
        raise QualityError("nothing was measured; the lines above say why")
