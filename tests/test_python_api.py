"""The Python API: conversion, selection, training and report by the functions that the packages export."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import deltanet_convert
import deltanet_hf
import deltanet_recipes
from deltanet_convert import convert, plan, select
from deltanet_convert.select import run
from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report import write_report
from deltanet_hf.evaluation.report.material import ReportOptions
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_recipes import distill, report
from support.tiny_conversion import TOKENS, quick_start, teacher_folder, text_file
from support.tiny_run import ALIGN, make_workplace, recipe_tree, write_recipe


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    return teacher_folder(tmp_path / "teacher", "llama")


def test_a_conversion(teacher: Path, tmp_path: Path) -> None:
    text = text_file(tmp_path)
    options: dict[str, Any] = {"keep": "every:2", "mixer": "gated_deltanet", "set": {"allow_neg_eigval": True}}
    made = convert(teacher, tmp_path / "out", text=text, calibration_tokens=TOKENS, **options)
    assert made == json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert made["options"]["set"] == {"allow_neg_eigval": True}
    table = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.deltanet
    assert table["layers"] == ["linear", "softmax", "linear", "softmax"]
    planned = plan(teacher, **options)
    assert planned.to_json()["converted_layers"] == [0, 2]
    assert planned.cache_bytes == made["plan"]["cache_bytes"]
    with pytest.raises(UserError, match=r"^calibration_token: unknown option, did you mean calibration_tokens\?$"):
        plan(teacher, calibration_token=3)


def test_a_selection_for_a_conversion(teacher: Path, tmp_path: Path) -> None:
    found = select(teacher, tmp_path / "s.json", keep="1", method="uniform", mixer="gated_deltanet")
    assert found.layers == (2,)
    planned = plan(teacher, keep=str(tmp_path / "s.json"), mixer="gated_deltanet")
    assert planned.to_json()["converted_layers"] == [0, 1, 3]


def test_the_defaults_are_those_of_the_commands(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and states, but windows alone where the converted model will read further than its teacher."""
    tasks: list[Any] = []
    monkeypatch.setattr(run, "run_selection", lambda task, *args, **kwargs: tasks.append(task))
    titles = []
    further: dict[str, Any]
    for further in ({}, {"context": 512}):
        titles.append({layer.title for layer in plan(teacher, keep="none", **further).layers})
        select(teacher, tmp_path / "s.json", **further)
    assert titles == [{"Gated DeltaNet + window 257"}, {"window of 481"}]
    assert [task.sizes.kind.mixer.name for task in tasks] == ["gated_deltanet", "window"]
    assert [task.sizes.bits for task in tasks] == [4, 4]


def test_a_training_run(tmp_path: Path) -> None:
    place = make_workplace(tmp_path / "place", layers=(0, 2))
    recipe = write_recipe(tmp_path, recipe_tree(place, [ALIGN], output=str(tmp_path / "unused")))
    changes = {"stages.align.tokens": ALIGN["batch_tokens"]}
    final = distill(recipe, changes, output=tmp_path / "run")
    assert final == tmp_path / "run" / "final"
    assert json.loads((final / "recipe.json").read_text())["stages"][0]["tokens"] == ALIGN["batch_tokens"]


def test_a_report_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_report, "run_report", lambda options, say: {"options": options})
    files = {"texts": {"mine": "x.txt"}, "data": "rows", "haystack": None}
    made = report("teacher", [tmp_path / "a", "b=hub/b"], tmp_path / "out", suite="texts", limit=2, **files)
    students, paths = [str(tmp_path / "a"), "b=hub/b"], {"texts": {"mine": Path("x.txt")}, "data": Path("rows")}
    assert made["options"] == ReportOptions("teacher", students, tmp_path / "out", suite="texts", limit=2, **paths)
    assert report("teacher", "a", tmp_path / "out")["options"].students == ["a"]


def test_the_names_of_deltanet_hf_are_found_when_they_are_used() -> None:
    names = [name for name in deltanet_hf.__all__ if name != "__version__"]
    assert [getattr(deltanet_hf, name).__name__ for name in names] == names
    assert deltanet_hf.set_cache_bits is set_cache_bits


@pytest.mark.parametrize("package", [deltanet_convert, deltanet_recipes])
def test_what_a_package_exports_is_documented(package: Any) -> None:
    for name in package.__all__:
        function = getattr(package, name)
        assert ">>> " in inspect.getdoc(function)
        documented = inspect.getdoc(function).partition("Args:")[2]
        assert [each for each in inspect.signature(function).parameters if each not in documented] == []
