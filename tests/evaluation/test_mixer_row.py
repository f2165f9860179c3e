"""Rows that compare mixers: the teacher against itself, a student before and after a run; the tables drawn of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from measuring.study import mixer_row
from mixers_table import mixers
from tests.evaluation.conftest import random_arrays

MEASURED = ("kl", "wt2", "heldwiki", "repeat", "needles_1k", "pairs_8")


@pytest.fixture
def small(short_cells: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows."""
    monkeypatch.setattr(mixer_row, "TEXT_WINDOW", 64)
    monkeypatch.setattr(mixer_row, "SEGMENT", 16)
    monkeypatch.setattr(mixer_row, "LENGTH", 128)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    random_arrays(tmp_path, "wt2", "heldwiki", "novels")
    return tmp_path


def test_rows(small: None, arrays: Path, teacher_folder: Path, student_folder: Path, tmp_path: Path) -> None:
    final = tmp_path / "run" / "final"
    shutil.copytree(student_folder, final)
    stages = [{"kind": "distil", "optimizer": {"mixer_lr": 0.003}}]
    (final / "recipe.json").write_text(json.dumps({"stages": stages, "seed": 7}))
    log = [
        {"stage": stage, "step": step, "tokens": 100 * step, "seconds": step, "tokens_per_second": speed * step}
        for stage, speed in (("align", 900.0), ("distil", 50.0))
        for step in (0, 1, 2, 3)
    ]
    (final.parent / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    out = tmp_path / "rows.json"
    models = [f"teacher={teacher_folder}", f"start={student_folder}", f"trained={final}"]
    mixer_row.main(arrays, out, str(teacher_folder), models, limit=3)
    teacher, start, trained = json.loads(out.read_text())
    assert (teacher["mixer"], teacher["kept"], teacher["tokens"]) == ("softmax", [0, 1, 2, 3], 0)
    assert (start["mixer"], start["kept"], start["tokens"], start["seed"]) == ("gated_deltanet", [1, 3], 0, None)
    assert teacher["kl"] == pytest.approx(0, abs=1e-4)
    assert start["kl"] > 0.01
    for key in MEASURED:
        assert {key, f"{key}_se"} <= teacher.keys() & start.keys()
    assert teacher["state_mb"] == pytest.approx(4 * 128 * 2 * 2 * 8 * 4 / 1e6, abs=1e-3)
    assert 0 < start["state_mb"] < teacher["state_mb"]
    assert start["decode_ms"] > 0
    assert "train_tokens_per_s" not in start
    assert (trained["tokens"], trained["seed"], trained["rate"]) == (600, 7, 0.003)
    assert trained["train_tokens_per_s"] == 100  # the median of the last stage, without its first row
    assert {key: trained[key] for key in MEASURED} == {key: start[key] for key in MEASURED}
    assert "kl " in mixer_row.shown(trained)
    assert str(tmp_path) not in out.read_text()


def row(run: str, **values: Any) -> dict[str, Any]:
    common = {"mixer": "kda", "set": {}, "kept": [], "tokens": 9_879_552, "seed": 0, "rate": 1e-3}
    return {"run": run, **common, **{key: 2.0 for key in MEASURED}, "kl_se": 0.1, "decode_ms": 9.0, **values}


def test_a_table_per_budget_joins_seeds_and_lists_failures() -> None:
    rows = [
        row("teacher", mixer="softmax", kept=[0, 1], tokens=0, kl=0.0),
        row("kda-all-s0", kl=0.4),
        row("kda-all-s1", kl=0.5, seed=1),
        row("kda-all-fast-s0", rate=3e-3),
        row("kda-kept-s0", kept=[0]),
        row("delta-all-3m-s0", mixer="deltaproduct", set={"num_householder": 3, "allow_neg_eigval": True}, tokens=3e6),
        {"run": "mesa-all-s0", "error": "it diverged"},
    ]
    blocks = mixers(rows).split("\n\n")
    assert blocks[0::2] == [
        "**All layers converted, 10M tokens**",
        "**All layers converted, 3M tokens**",
        "**1 layers softmax, 10M tokens**",
        "failed: mesa-all-s0 (it diverged)",
    ]
    lines = blocks[1].splitlines()
    assert lines[0].startswith("| | KL | WikiText-2 | Wikipedia | exact repeat |")
    assert lines[2].startswith("| teacher | 0.000 ± 0.100 | 2.0 |")
    assert lines[3].startswith("| kda (2 seeds) | 0.450 ± 0.050 | 2.0 ± 0.0 |")
    assert lines[4].startswith("| kda, rate 0.003 | 2.000 ± 0.100 |")
    assert lines[4].endswith("| - | 9.0 | - |")
    assert blocks[3].splitlines()[3].startswith("| deltaproduct, num_householder=3, allow_neg_eigval=true |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert mixers([]) == "Nothing has been measured yet."


def test_a_table_shows_what_is_not_trained_and_which_speeds_were_shared() -> None:
    rows = [
        row("teacher", mixer="softmax", kept=[0, 1], tokens=0),
        row("window-all", mixer="window 201", set={"window": 201}, tokens=0),
        row("window-kept", mixer="window 201", set={"window": 201}, kept=[0], tokens=0),
        row("kda-all-s0", runs_at_once=1),
        row("kda-kept-s0", kept=[0], runs_at_once=4, train_tokens_per_s=1000),
    ]
    _, whole, _, kept, note = mixers(rows).split("\n\n")
    names = [[line.split(" | ")[0] for line in table.splitlines()[2:]] for table in (whole, kept)]
    assert names == [["| teacher", "| window 201, not trained", "| kda"]] * 2
    assert "†" not in whole
    assert kept.splitlines()[-1].endswith("| 1,000 † | 9.0 † | - |")
    assert note == "† 4 runs shared the GPU."
