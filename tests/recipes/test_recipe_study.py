"""A study on tiny models: rows for finished and failed runs, resuming, and the files that are kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS, Mixer
from measuring.study.runner import StudyRun
from measuring.study.study_config import load_study
from support.refusals import assert_refused
from support.tiny_run import ALIGN, DISTIL, WORDS, make_workplace, recipe_tree, write_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with teacher, text, a recipe, and evaluation arrays of one window each."""
    folder = make_workplace(tmp_path_factory.mktemp("study"))
    short = {"tokens": 256}
    write_recipe(folder, recipe_tree(folder, [{**ALIGN, **short}, {**DISTIL, **short}]))
    tokenizer = folder / "teacher" / "tokenizer.json"
    words = {f'"w{40 + i}"': f'"Ġ{"abcdefghijklmnopqrst"[i] * 3}"' for i in range(20)}  # for the recall of pairs
    tokenizer.write_text(re.sub(r'"w\d+"', lambda found: words.get(found[0], found[0]), tokenizer.read_text()))
    (folder / "calibration.txt").write_text(" ".join(f"w{i * i % WORDS}" for i in range(400)))
    arrays = folder / "arrays"
    arrays.mkdir()
    ids = np.random.default_rng(0).integers(4, 4 + WORDS, 1100).astype(np.uint16)
    for name in ("wt2", "heldwiki", "novels"):
        np.save(arrays / f"{name}.npy", ids)
    return folder


def write_study(workplace: Path, folder: Path, runs: list[dict[str, Any]]) -> Path:
    tree = {
        "variables": {"home": None, "out": str(folder)},
        "teacher": "${home}/teacher",
        "arrays": "${home}/arrays",
        "output": "${out}/runs",
        "results": "${out}/results.json",
        "convert": {"text": "${home}/calibration.txt", "calibration_tokens": 64},
        "set": {"log.every": 1},
        "runs": runs,
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command(workplace: Path, study: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "measuring.study", str(study), f"home={workplace}", *arguments]


def call(workplace: Path, study: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths())), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command(workplace, study, *arguments), env=environment, capture_output=True, text=True)


def paths() -> list[Path]:
    return [ROOT, ROOT / "kernels", ROOT / "convert", ROOT / "recipes"]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in json.loads((folder / "results.json").read_text())}


@pytest.mark.slow
def test_a_study_trains_measures_records_failures_and_resumes(workplace: Path, tmp_path: Path) -> None:
    recipe = str(workplace / "recipe.yaml")
    runs: list[dict[str, Any]] = [
        {"name": "no-rope", "recipe": recipe, "convert": {"set": {"rope": False}}, "set": {"seed": 1}},
        {
            "name": "diverging",
            "recipe": recipe,
            "set": {"stages.align.optimizer.mixer_lr": 1e6},
        },
        {"name": "kept", "recipe": recipe, "set": {"stages.align": None, "stages.distil.train": "full"}, "keep": True},
        {"name": "teacher", "untrained": "teacher"},
    ]  # fmt: skip
    study = write_study(workplace, tmp_path, runs)
    done = call(workplace, study)
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path)
    assert list(rows) == ["no-rope", "diverging", "kept", "teacher"]
    assert "diverged" in rows["diverging"]["error"]
    assert (rows["no-rope"]["set"], rows["kept"]["set"]) == ({"rope": False}, {})
    assert (rows["no-rope"]["seed"], rows["kept"]["seed"]) == (1, 0)
    assert (rows["no-rope"]["tokens"], rows["kept"]["tokens"], rows["teacher"]["tokens"]) == (512, 256, 0)
    assert rows["teacher"]["kl"] == pytest.approx(0, abs=1e-4)
    for name in ("no-rope", "kept"):
        assert rows[name]["kl"] > 0
    assert (tmp_path / "runs" / "kept" / "final" / "config.json").is_file()
    assert not (tmp_path / "runs" / "no-rope" / "final").exists()
    assert (tmp_path / "runs" / "no-rope" / "log.jsonl").is_file()
    assert len([f for f in (tmp_path / "runs" / "conversions").iterdir() if (f / "config.json").is_file()]) == 2
    assert "diverged" in (tmp_path / "runs" / "logs" / "diverging.log").read_text()

    stamps = {name: (tmp_path / "runs" / name / "row.json").stat().st_mtime_ns for name in ("no-rope", "kept")}
    (tmp_path / "results.json").unlink()
    runs[1]["set"] = {}  # repaired
    again = call(workplace, write_study(workplace, tmp_path, runs))
    assert again.returncode == 1  # its folder holds a run with the other rate
    assert "another recipe" in rows_of(tmp_path)["diverging"]["error"]
    assert list(rows_of(tmp_path)) == ["no-rope", "diverging", "kept", "teacher"]
    for name, stamp in stamps.items():
        assert (tmp_path / "runs" / name / "row.json").stat().st_mtime_ns == stamp
    renamed = call(workplace, write_study(workplace, tmp_path, [{**runs[0], "set": {"seed": 2}}]))
    assert renamed.returncode == 2
    assert "holds a run with another set.seed (1, now 2)" in renamed.stderr


@pytest.mark.slow
def test_a_study_that_is_ended_leaves_no_process_and_continues(workplace: Path, tmp_path: Path) -> None:
    recipe = str(workplace / "recipe.yaml")
    run = {"name": "one", "recipe": recipe, "set": {"stages.distil.tokens": 128 * 400}}
    study = write_study(workplace, tmp_path, [run])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths())), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command(workplace, study), env=environment)
    log = tmp_path / "runs" / "one" / "log.jsonl"
    while not (log.is_file() and '"distil", "step": 4,' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    lines = log.read_text()
    time.sleep(1.0)
    assert log.read_text() == lines
    assert not (tmp_path / "results.json").exists()
    short = call(workplace, study)
    assert short.returncode == 0, short.stderr
    assert "continues after step" in (tmp_path / "runs" / "logs" / "one.log").read_text()
    assert rows_of(tmp_path)["one"]["kl"] > 0


def test_long_runs_come_first_and_one_conversion_serves_many(workplace: Path, tmp_path: Path) -> None:
    recipe = str(workplace / "recipe.yaml")
    runs = [
        {"name": "a", "recipe": recipe},
        {"name": "b", "recipe": recipe, "set": {"stages.distil.tokens": 10240}},
        {"name": "c", "recipe": recipe, "convert": {"profile": "qwen3_5"}},
        {"name": "d", "recipe": recipe, "convert": {"mixer": "window", "training": False}},
        {"name": "start", "untrained": "start"},
        {"name": "teacher", "untrained": "teacher"},
    ]
    study = load_study(write_study(workplace, tmp_path, runs), [f"home={workplace}"])
    work = StudyRun(study, list(study.runs), [None])
    assert [run.name for run in work.waiting] == ["b", "a", "c", "d", "start", "teacher"]
    assert len(work.conversions) == 3
    qwen3_5, window = (" ".join(run.convert.arguments()) for run in work.waiting[2:4])
    assert "--mixer gated_deltanet --profile qwen3_5" in qwen3_5
    assert "--no-training" not in qwen3_5
    assert "--mixer window --profile faithful --no-training" in window


def test_a_wrong_study_is_one_clear_error(workplace: Path, tmp_path: Path) -> None:
    good = {"name": "good", "recipe": str(workplace / "recipe.yaml")}
    rows: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "missing.yaml"}, "run bad: missing.yaml: no such recipe"),
        ({"set": {"stages.distil.trane": "full"}}, "unknown key"),
        ({"convert": {"layer": "all"}}, "runs.1.convert.layer"),
        ({"untrained": "start"}, "exactly one of recipe and untrained"),
        ({"name": "good"}, "two runs are called 'good'"),
        ({"name": "a/b"}, "names a folder"),
        ({"set": {"seed": "${seed}"}}, r"\$\{seed\} is not among"),
    ]

    def load(change: dict[str, Any]) -> None:
        study = write_study(workplace, tmp_path, [good, {**good, "name": "bad", **change}])
        load_study(study, [f"home={workplace}"])

    assert_refused(load, [({"change": change}, UserError, said) for change, said in rows])


def test_missing_variables_are_named(workplace: Path, tmp_path: Path) -> None:
    study = write_study(workplace, tmp_path, [{"name": "teacher", "untrained": "teacher"}])
    for given, words in (([], r"home=\.\.\."), (["house=x"], "house=x: expected NAME=VALUE")):
        with pytest.raises(UserError, match=words):
            load_study(study, given)


def test_work_goes_to_the_device_with_the_least(workplace: Path, tmp_path: Path) -> None:
    recipe = str(workplace / "recipe.yaml")
    lengths = [{"stages.align": None, "stages.distil.tokens": 128 * (9 - i)} for i in range(4)]
    runs = [{"name": f"r{i}", "recipe": recipe, "set": lengths[i]} for i in range(4)]
    study = load_study(write_study(workplace, tmp_path, runs), [f"home={workplace}"])
    work = StudyRun(study, list(study.runs), ["0", "1", "0", "1"])
    (conversion,) = work.conversions
    work.conversion_done(conversion)
    first = work.next_run("0")
    assert first is not None
    assert first.name == "r0"
    taken: list[str | None] = []

    def ask_on_the_busy_device() -> None:
        run = work.next_run("0")
        taken.append(run and run.name)

    thread = threading.Thread(target=ask_on_the_busy_device)
    thread.start()
    time.sleep(0.1)
    assert taken == []  # GPU 1 has nothing to do yet
    assert [work.next_run("1").name, work.next_run("1").name] == ["r1", "r2"]  # type: ignore[union-attr]
    thread.join(5)
    assert taken == ["r3"]


def test_the_study_of_mixers_trains_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    study = load_study(Path("recipes/studies/smollm2-135m-mixers-study.yaml"), ["teacher=t", "arrays=a", "seed=1"])
    trained = [run for run in study.runs if run.recipe is not None]
    assert {round(study.tokens(run) / 1e6) for run in trained} == {3, 10}
    for run in trained:
        recipe = study.recipe(run, "student")[1]
        assert (recipe.seed, run.convert.seed) == (1, 1)
        assert run.name.endswith("-s1")
        assert ("-kept" in run.name) == (run.convert.layers == "keep:2,7,8,15,17,18,23")
        assert ("-3m" in run.name) == (study.tokens(run) < 4e6)
        assert run.name.startswith(run.convert.mixer)
        rates = {stage.optimizer.mixer_lr for stage in recipe.stages}
        assert ("-slow" in run.name or "-fast" in run.name) == (rates != {3e-3, 1e-3})
    assert {run.convert.mixer for run in trained} >= {name for name, kind in MIXERS.items() if issubclass(kind, Mixer)}
