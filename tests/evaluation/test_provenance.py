"""The commands of a row: how a model was converted, trained and measured, from the records in its folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import typer

from deltanet_convert.calibration_text import SHIPPED_TEXT
from deltanet_convert.options import ConvertOptions
from deltanet_recipes.cli import build_app
from deltanet_recipes.config import read_recipe
from measuring.study.model_facts import run_facts
from measuring.study.provenance import commands, conversion, flags, training

RECIPE = "smollm2-135m"
DEFAULT = "deltanet-hf convert T student --keep layers:1,3 --mixer gated_deltanet+window --cache-bits 16"


def report(text: str = SHIPPED_TEXT, **given: Any) -> dict[str, Any]:
    """The record of a conversion of four layers with these options."""
    options = ConvertOptions(**{"layers": "auto", "mixer": "gated_deltanet+window", "cache_bits": 16, **given})
    record = {**options.decisive(), "keep": options.keep, "deltanet": options.table(4, (1, 3)).to_dict()}
    return json.loads(json.dumps({"teacher": {"name": "T"}, "options": record, "text": {"source": text}}))


def test_the_command_of_a_conversion_writes_out_what_a_default_decides() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, "--keep layers:1,3 --mixer gated_deltanet+window --cache-bits 16"),
        ({"layers": "all", "mixer": "kda"}, "--keep none --mixer kda --cache-bits 16"),
        (
            {"layers": "every:4", "mixer": "gated_deltanet", "profile": "qwen3_5"},
            "--keep every:4 --mixer gated_deltanet --cache-bits 16 --profile qwen3_5",
        ),
        (
            {"mixer": "window", "changes": ("window=225",), "cache_bits": 4, "text": "wiki.txt"},
            "--keep layers:1,3 --mixer window --set window=225 --cache-bits 4 --text wiki.txt",
        ),
        (
            {"layers": "/home/me/heads.json", "changes": ("gate_bias=false",), "seed": 1},
            "--keep heads.json --mixer gated_deltanet+window --set gate_bias=false --cache-bits 16 --seed 1",
        ),
        (
            {"layers": "keep:3", "training": False},
            "--keep layers:3 --mixer gated_deltanet+window --cache-bits 16 --no-training",
        ),
    ]
    command = typer.main.get_command(build_app("convert")).commands["convert"]  # type: ignore[attr-defined]
    for given, words in rows:
        made = conversion(report(**given))
        assert shlex.join(made) == f"deltanet-hf convert T student {words}"
        command.make_context("convert", made[2:]).close()


def test_a_recipe_is_the_shipped_one_with_its_changes_or_named_by_its_file() -> None:
    for changes in (
        [],
        ["stages.align.tokens=16384", "stages.long.tokens=9879552"],
        ["seed=1", "stages.long.cache_bits=16", "data.sources.0.path=/data/wiki.jsonl.xz"],
    ):
        made = read_recipe(RECIPE, ["student=s", "output=o", "teacher=t", "log.every=3", "data.cache=c", *changes])
        found = training(json.loads(made.model_dump_json()))
        assert found[:3] == [RECIPE, "student=student", "output=run"]
        assert sorted(found[3:]) == sorted(changes)
    recipe = json.loads(read_recipe(RECIPE).model_dump_json())
    recipe["stages"].reverse()
    assert training(recipe) == ["recipe.json", "student=student", "output=run"]


def test_a_row_has_all_commands(tmp_path: Path) -> None:
    words = ["arrays", "rows.json", *flags(teacher="T", limit=None, window=True, model="NAME=FOLDER", bits=4)]
    measured = "python -m measuring.study.state_rows arrays rows.json --teacher T --window --model NAME={} --bits 4"
    folder = tmp_path / "run" / "final"
    folder.mkdir(parents=True)
    assert commands(folder, "measuring.study.state_rows", words) == measured.format("final")
    (folder / "conversion.json").write_text(json.dumps(report()))
    converted = f"{DEFAULT} && "
    assert commands(folder, "measuring.study.state_rows", words) == converted + measured.format("student")
    (folder / "recipe.json").write_text(read_recipe(RECIPE).model_dump_json())
    assert commands(folder, "measuring.study.state_rows", words) == (
        f"{converted}deltanet-hf distill {RECIPE} student=student output=run && {measured.format('run/final')}"
    )


def test_the_tokens_of_a_run_are_those_of_its_stages(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    assert run_facts(final) == {}
    (final / "recipe.json").write_text(json.dumps({"seed": 7}))
    log = [{"stage": stage, "step": step, "tokens": 100 * step} for stage in ("align", "distil") for step in range(4)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    assert run_facts(final) == {"tokens": 600, "seed": 7}
