"""Reports and evaluations that are killed, hit a full disk or share an output: the same command continues them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report import bench, write_report
from deltanet_hf.evaluation.report.material import ReportOptions
from deltanet_hf.evaluation.report.model_rows import line_up
from deltanet_hf.evaluation.report.unfinished import JOURNAL, Unfinished
from deltanet_hf.evaluation.report.write_report import run_report
from deltanet_hf.evaluation.tasks import kept_answers
from deltanet_hf.evaluation.tasks.kept_answers import KeptAnswers
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.evaluation.tasks.suites import SUITES
from deltanet_hf.file_lock import locked
from deltanet_recipes.cli import build_app
from support.file_limit import limit_during
from tests.evaluation.conftest import report_options, without_times


class Stop(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module", autouse=True)
def tiny_suite() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        short: dict[str, Any] = {"pairs": (8,), "text_windows": (128,), "repeated": 64, "speed_lengths": (16,)}
        tasks = tuple(task for task in SUITES["small"].tasks if task.name in ("piqa", "sciq"))
        tiny = replace(SUITES["small"], tasks=tasks, needle_lengths=(), **short)
        patch.setitem(SUITES, "tiny", tiny)
        yield


@pytest.fixture
def options(teacher_folder: Path, student_folder: Path, data_folder: Path, tmp_path: Path) -> ReportOptions:
    return report_options(teacher_folder, student_folder, data_folder, tmp_path, baselines=("window",))


def test_an_interrupted_report_measures_the_missing_models_only(
    options: ReportOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    real = bench.Bench.measure

    def measure(self: bench.Bench, row: Any, say: Any) -> Any:
        if len(measured) == 2:
            measured.append("stopped")
            raise Stop
        measured.append(row.name)
        return real(self, row, say)

    monkeypatch.setattr(bench.Bench, "measure", measure)
    with pytest.raises(Stop):
        run_report(options, say=lambda _: None)
    assert [row["name"] for row in json.loads((options.out / "report.json").read_text())["models"]] == measured[:2]
    said: list[str] = []
    with monkeypatch.context() as patch:
        limit_during(patch, write_report, "write_figures", 100)
        with pytest.raises(UserError, match=r"the disk is full"):
            run_report(options, say=said.append)
    assert "continues after window 64 + 4 sinks (2 of 3 models measured before)" in said
    resumed = run_report(options, say=lambda _: None)  # only the figures are missing
    assert measured == ["teacher", "window 64 + 4 sinks", "stopped", "hybrid"]
    names = {path.name for path in options.out.iterdir()}
    assert {"report.md", "report.json", "speed.png"} <= names
    assert not any(name.startswith(".") or name.endswith(".partial") for name in names)
    expected = run_report(replace(options, out=tmp_path / "direct"), say=lambda _: None)
    assert without_times(resumed) == without_times(expected)
    assert resumed["settings"] == expected["settings"]
    assert resumed["models"][2]["percent_of_teacher"] == expected["models"][2]["percent_of_teacher"]


def test_an_unfinished_report_of_something_else_is_measured_again(options: ReportOptions) -> None:
    options.out.mkdir()
    rows, path = line_up(options.teacher, options.students, options.baselines), options.out / JOURNAL
    unfinished = Unfinished(options, rows, pytest.fail)
    scores = bench.ModelScores(seconds={"texts": 1.0})
    unfinished.add(rows[0], bench.Outcome(scores, [], {"tasks": {}}))
    kept = path.read_bytes()
    said: list[str] = []
    assert len(Unfinished(options, rows, said.append).outcomes) == 1
    assert len(Unfinished(replace(options, processes=4), rows, said.append).outcomes) == 1
    path.write_bytes(kept + b'{"step": "window 64')  # cut by a kill
    assert len(Unfinished(options, rows, said.append).outcomes) == 1
    for changed in (replace(options, limit=4), replace(options, texts={})):
        path.write_bytes(kept)
        said.clear()
        assert Unfinished(changed, rows, said.append).outcomes == []
        assert "holds an unfinished report with another options." in said[0]
    for damaged in (b"{}\n", kept.replace(b'"bytes"', b'"bites"'), b"\xff\n", kept.replace(b"teacher", b"t", 1)):
        path.write_bytes(damaged)
        said.clear()
        assert Unfinished(options, rows, said.append).outcomes == []
        assert len(said) == 1
        assert "\n" not in said[0]
    path.write_bytes(kept)
    options.texts["hay"].write_text("another text")
    assert Unfinished(options, rows, said.append).outcomes == []


def test_a_report_into_a_folder_in_use_is_refused(options: ReportOptions) -> None:
    with (
        locked(options.out / ".lock", options.out, "report"),
        pytest.raises(UserError, match=r"another report to .* is running"),
    ):
        run_report(options, say=lambda _: None)


def test_an_interrupted_evaluation_asks_for_the_missing_answers_only(
    student_folder: Path, data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kept_answers.TOGETHER, "loglikelihood", 5)
    asked: list[int] = []
    real = DeltaNetLM._loglikelihood_tokens

    def ask(self: DeltaNetLM, requests: Any, **options: Any) -> Any:
        asked.append(len(requests))
        if len(asked) == 3:
            raise Stop
        return real(self, requests, **options)

    def evaluate(name: str, answers: Path, *more: str) -> dict[str, Any]:
        arguments = ["eval", str(student_folder), "--data", str(data_folder), "--tasks", "piqa,sciq", *more]
        arguments += ["--device", "cpu", "--output_path", str(tmp_path / name), "--answers", str(answers)]
        result = CliRunner().invoke(build_app("eval"), arguments)
        if result.exception is not None:
            raise result.exception
        return json.loads(next((tmp_path / name).rglob("results_*.json")).read_text())["results"]  # type: ignore[no-any-return]

    file = tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(DeltaNetLM, "_loglikelihood_tokens", ask)
        with pytest.raises(Stop):
            evaluate("killed", file)
        file.write_bytes(file.read_bytes() + b'{"step": "0a", "figures": [[')  # the line that a kill cuts
        resumed = evaluate("resumed", file)
    assert asked[:3] == [5, 5, 5]
    assert sum(asked[3:]) == 6 * 2 + 6 * 4 - 10  # two options, four options; ten answers were kept
    assert resumed == evaluate("direct", tmp_path / "direct.jsonl")
    assert file.read_bytes() == (tmp_path / "direct.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"holds answers of a model with another window \(None, now \[8, 4\]\); give"):
        evaluate("window", file, "--window", "8")


def test_answers_of_every_kind_are_kept(student_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    texts = [SimpleNamespace(args=(f"The {n} cats sit.",)) for n in range(3)]
    prompts = [SimpleNamespace(args=(f"The {n}", {"until": ["."], "max_gen_toks": 4})) for n in range(3)]
    found = []
    for _ in range(2):
        lm = DeltaNetLM(str(student_folder), answers=str(file), device="cpu", batch_size=2)
        found.append([lm.loglikelihood_rolling(texts), lm.generate_until(prompts)])
        size = file.stat().st_size
    assert found[0] == found[1]
    assert file.stat().st_size == size
    assert all(isinstance(answer, float) for answer in found[0][0])
    assert all(isinstance(answer, str) for answer in found[0][1])


def test_answers_belong_to_the_bits_of_the_cache_and_to_what_a_prompt_may_hold(
    student_folder: Path, tmp_path: Path
) -> None:
    """Of the same weights; the number of rows that are answered together is free."""
    file, other = tmp_path / "answers.jsonl", tmp_path / "other"
    shutil.copytree(student_folder, other)
    config = json.loads((other / "config.json").read_text())
    config["deltanet"]["cache_bits"] = 8
    (other / "config.json").write_text(json.dumps(config))
    for batch_size in (2, "auto"):
        DeltaNetLM(str(student_folder), answers=str(file), device="cpu", batch_size=batch_size)
    with pytest.raises(UserError, match=r"with another cache_bits \(16, now 8\)"):
        DeltaNetLM(str(other), answers=str(file), device="cpu")
    with pytest.raises(UserError, match=r"with another model_args.max_length \(None, now '64'\)"):
        DeltaNetLM(str(student_folder), answers=str(file), device="cpu", max_length=64)


def test_a_file_that_holds_no_answers_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for content in (b"not json\n", b"[1]\n", b"{}\n", b"cut", b'{"request": {"weights": "x"}}\n5\n'):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"notes.txt: damaged, or a file of something else [^\n]*$"):
            KeptAnswers(file, {"weights": "x"})
        assert file.read_bytes() == content


def test_a_full_disk_ends_with_one_line_and_leaves_whole_answers(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    requests = [SimpleNamespace(args=(str(n),)) for n in range(20)]
    answers = KeptAnswers(file, {})
    with pytest.MonkeyPatch.context() as patch:
        limit_during(patch, answers._journal, "done", file.stat().st_size + 150, 0)
        with pytest.raises(UserError, match="disk is full"):
            answers.answer("loglikelihood_rolling", requests, lambda some: [1.5] * len(some))
    asked: list[int] = []

    def ask(some: list[Any]) -> list[float]:
        asked.append(len(some))
        return [1.5] * len(some)

    assert KeptAnswers(file, {}).answer("loglikelihood_rolling", requests, ask) == [1.5] * 20
    KeptAnswers(file, {}).answer("loglikelihood_rolling", requests[7::-1], ask)
    assert asked == [8, 4, 8]  # the first eight were kept, in their order


@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval", "report"])
def test_killed_commands_continue(command: str, teacher_folder: Path, student_folder: Path, tmp_path: Path) -> None:
    """SIGKILL after the first answers, and after the first model; both then give what an undisturbed command gives."""

    def start(name: str) -> subprocess.Popen[str]:
        out = tmp_path / name
        arguments = {
            "eval": [str(student_folder), "--tasks", "demo_cloze,demo_repeat", "--answers", str(out / "answers.jsonl"),
                     "--output_path", str(out)],
            "report": [str(teacher_folder), f"hybrid={student_folder}", "--suite", "texts", "--limit", "1",
                       "--baselines", "window", "--out", str(out), "--max-length", "512"],
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "deltanet_recipes.cli", command, *arguments[command], "--device", "cpu"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    kept = tmp_path / "killed" / {"eval": "answers.jsonl", "report": JOURNAL}[command]
    process = start("killed")
    while not kept.exists() or kept.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    for name in ("killed", "direct"):
        process = start(name)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    found = []
    for name in ("killed", "direct"):
        (file,) = (tmp_path / name).rglob("results_*.json" if command == "eval" else "report.json")
        document = json.loads(file.read_text())
        found.append(document["results"] if command == "eval" else without_times(document))
    assert found[0] == found[1]
    assert command == "eval" or not kept.exists()
