"""`deltanet-hf eval` runs lm-eval's own command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from lm_eval.api.registry import get_model
from typer.testing import CliRunner

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.evaluation.tasks.lm_eval_run import run_lm_eval
from deltanet_recipes.cli import COMMANDS
from deltanet_recipes.evaluation_command import evaluate, named_files
from support.refusals import assert_refused


@pytest.fixture
def app() -> typer.Typer:
    """An application with the command `eval`; the callback makes the command's name part of the arguments."""
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("eval", context_settings=COMMANDS["eval"].context)(evaluate)
    return app


def test_the_model_is_registered() -> None:
    assert get_model("deltanet-hf") is DeltaNetLM


def test_local_tasks_end_to_end(app: typer.Typer, student_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    """Options of lm-eval reach it, and the results file holds scores of local rows."""
    before = list(sys.argv)
    arguments = ["eval", str(student_folder), "--data", str(data_folder), "--window", "8", "--tasks", "piqa,sciq"]
    arguments += ["--limit", "3", "--device", "cpu", "--output_path", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None, result.exception
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert set(results["results"]) == {"piqa", "sciq"}
    assert results["n-samples"]["piqa"] == {"original": 6, "effective": 3}
    assert results["config"]["model_args"]["window"] == 8
    assert sys.argv == before


def test_stock_tasks_use_the_stock_index(monkeypatch: pytest.MonkeyPatch, teacher_folder: Path) -> None:
    """lm-eval's index is read for stock tasks, but not for the tasks of this package."""
    import lm_eval.__main__
    import lm_eval.tasks

    used: list[bool] = []
    stock = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: used.append(lm_eval.tasks.TaskManager is stock))
    run_lm_eval(str(teacher_folder), ["--tasks", "mmlu", "demo_cloze"])
    run_lm_eval(str(teacher_folder), ["-t", "demo_repeat,demo_cloze", "--limit", "2"])
    run_lm_eval(str(teacher_folder), ["--tasks=demo_repeat", "--limit=2"])
    assert used == [True, False, False]
    assert lm_eval.tasks.TaskManager is stock


def test_the_users_own_task_folder_is_included(
    monkeypatch: pytest.MonkeyPatch, teacher_folder: Path, tmp_path: Path
) -> None:
    import lm_eval.__main__

    (tmp_path / "mine.yaml").write_text("task: mine\ndataset_path: json\n")
    included: list[str] = []

    def read() -> None:
        folder = Path(sys.argv[sys.argv.index("--include_path") + 1])
        included.extend(path.read_text() for path in folder.glob("*.yaml"))

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", read)
    run_lm_eval(str(teacher_folder), ["--tasks", "mine", "--include_path", str(tmp_path)])
    assert any("mine.yaml" in text for text in included)


def test_only_unknown_tasks_are_the_users_mistake(monkeypatch: pytest.MonkeyPatch, teacher_folder: Path) -> None:
    import lm_eval.__main__

    for text, kind in (("Tasks not found: pika", UserError), ("something else", ValueError)):

        def fail(text: str = text) -> None:
            raise ValueError(text)

        monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", fail)
        with pytest.raises(kind, match=text):
            run_lm_eval(str(teacher_folder), ["--tasks", "demo_cloze"])


def test_mistakes_are_named(teacher_folder: Path) -> None:
    teacher, cloze = str(teacher_folder), ["--tasks", "demo_cloze"]
    rows: list[tuple[str, list[str], str]] = [
        ("model", ["--limit", "3"], "--tasks or --suite is missing"),
        ("model", ["--tasks", ""], "--tasks or --suite is missing"),
        ("model", ["--tasks", "piqa", "--include_path"], "--include_path needs a folder"),
        (teacher, [*cloze, "--device", "cuda:99"], "--device: 'cuda:99' cannot be used here"),
        (teacher, [*cloze, "--limit", "0"], "--limit: expected a number of rows above 0"),
        (teacher, [*cloze, "--limit=nan"], "--limit: expected a number of rows above 0"),
        (teacher, [*cloze, "--log_samples"], "add --output_path FOLDER"),
        (teacher, [*cloze, "--apply_chat_template"], "tokenizer has no chat template"),
        ("/no/where", cloze, r"^/no/where: no such folder[^\n]*$"),
        (
            teacher,
            ["--tasks", "lambada_last_word", "--device", "cpu"],
            r"Couldn't reach [^\n]*give local folders \(MODEL, --data\)$",
        ),
    ]
    assert_refused(
        lambda model, arguments: run_lm_eval(model, arguments),
        [({"model": model, "arguments": arguments}, UserError, said) for model, arguments, said in rows],
    )


def test_texts_of_ruler_that_lm_eval_cannot_make_are_refused(app: typer.Typer, teacher_folder: Path) -> None:
    """It would look for one of 768 tokens without end."""
    result = CliRunner().invoke(app, ["eval", str(teacher_folder), "--suite", "ruler", "--length", "1023"])
    assert result.exit_code == 2
    assert ">=1024" in result.output or "greater than or equal to 1024" in result.output, result.output


def test_a_window_of_no_tokens_is_refused(teacher_folder: Path) -> None:
    for window, sinks in ((0, 4), (8, -1), (10**30, 4)):
        with pytest.raises(UserError, match=rf"^--window {window}, --sinks {sinks}: a window has 1 to"):
            run_lm_eval(str(teacher_folder), ["--tasks", "demo_cloze"], window=window, sinks=sinks)


def test_texts_without_a_name_of_their_own_or_a_file_are_refused() -> None:
    assert named_files(["a=b.txt", "c=d=e.txt"]) == {"a": Path("b.txt"), "c": Path("d=e.txt")}
    for text in ("novel.txt", "=novel.txt", "novel="):
        with pytest.raises(UserError, match=f"--text {text}: expected NAME=FILE"):
            named_files([text])
    with pytest.raises(UserError, match=r"--text a=c.txt: expected NAME=FILE, with another NAME for each file"):
        named_files(["a=b.txt", "a=c.txt"])
