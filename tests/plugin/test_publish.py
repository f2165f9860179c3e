"""`publish_folder`: OUT is absent, old or complete, whatever happens while it is being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.publish import Workspace, output_path, publish_folder


class Killed(BaseException):
    """Stands for SIGKILL: no code may catch it and clean up."""


def filler(text: str, dies_after: str | None = None, error: BaseException | None = None) -> Any:
    """Writes two files in two steps; raises after the step `dies_after`."""

    def fill(workspace: Workspace) -> dict[str, Any]:
        for step in ("config.json", "weights"):
            if step not in workspace.steps:
                (workspace.model / step).write_text(text)
                workspace.done(step)
            if step == dies_after:
                raise error or Killed
        return {"text": text}

    return fill


def files(out: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in out.iterdir()}


def test_the_figures_and_files_of_a_complete_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = publish_folder(out, {"seed": 1}, filler("new"), resume=False, overwrite=False)
    assert figures == {"text": "new"}
    assert files(out) == {"config.json": "new", "weights": "new"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_replacing_without_resuming_starts_again(tmp_path: Path) -> None:
    """How a training run publishes its final model: the folder is always written anew."""
    out = tmp_path / "final"
    again: dict[str, Any] = {"resume": False, "overwrite": True, "what": "training run"}
    publish_folder(out, {}, filler("old"), **again)
    with pytest.raises(Killed):
        publish_folder(out, {}, filler("half", "config.json"), **again)
    assert files(out) == {"config.json": "old", "weights": "old"}
    publish_folder(out, {"another": "request"}, filler("new"), **again)
    assert files(out) == {"config.json": "new", "weights": "new"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("error", [UserError("refused"), QualityError("bad")])
def test_an_error_before_the_first_step_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def fill(workspace: Workspace) -> dict[str, Any]:
        raise error

    with pytest.raises(type(error)):
        publish_folder(tmp_path / "out", {}, fill, resume=False, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_an_error_after_a_step_keeps_it_for_resuming(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill = filler("first", "config.json", UserError("disk"))
    with pytest.raises(UserError, match="disk"):
        publish_folder(out, {}, fill, resume=False, overwrite=False, what="export")
    with pytest.raises(UserError, match=r"interrupted export .* --resume .* --overwrite"):
        publish_folder(out, {}, filler("second"), resume=False, overwrite=False, what="export")
    publish_folder(out, {}, filler("second"), resume=True, overwrite=False)
    assert files(out)["config.json"] == "first"


def test_a_resumed_run_names_what_has_changed(tmp_path: Path) -> None:
    out, before = tmp_path / "out", {"options": {"seed": 1, "dtype": None}}
    with pytest.raises(Killed):
        publish_folder(out, before, filler("first", "weights"), resume=False, overwrite=False)
    now = {"options": {"seed": 2, "dtype": None}}
    with pytest.raises(UserError, match=r"interrupted conversion .* another options\.seed \(1, now 2\); start again"):
        publish_folder(out, now, filler("first"), resume=True, overwrite=False)


def test_a_finished_result_is_returned_and_not_made_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish_folder(out, {}, filler("new"), resume=False, overwrite=False)

    def fill(workspace: Workspace) -> dict[str, Any]:
        raise AssertionError

    found = publish_folder(out, {}, fill, resume=True, overwrite=False, finished=lambda: {"text": "found"})
    assert found == {"text": "found"}
    with pytest.raises(UserError, match="out: exists"):
        publish_folder(out, {}, fill, resume=True, overwrite=False, finished=lambda: None)


def test_a_journal_line_torn_by_a_crash_is_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        publish_folder(out, {}, filler("first", "config.json"), resume=False, overwrite=False)
    with Workspace(out).journal.path.open("a") as journal:
        journal.write('{"step": "wei')
    publish_folder(out, {}, filler("second"), resume=True, overwrite=False)
    assert files(out) == {"config.json": "first", "weights": "second"}


def test_a_damaged_journal_is_refused_until_it_is_discarded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        publish_folder(out, {}, filler("first", "config.json"), resume=False, overwrite=False)
    Workspace(out).journal.path.write_text("nonsense\n")
    with pytest.raises(UserError, match=r"journal.jsonl: damaged, .*; start again with --overwrite"):
        publish_folder(out, {}, filler("second"), resume=True, overwrite=False)
    publish_folder(out, {}, filler("second"), resume=False, overwrite=True)
    assert files(out) == {"config.json": "second", "weights": "second"}


def test_outputs_that_end_in_no_name_are_refused() -> None:
    assert output_path(Path("new")) == Path.cwd() / "new"
    assert output_path(Path("~/new")) == Path.home() / "new"
    for path in ("/", "new/..", "~nobody-of-this-name/new"):
        with pytest.raises(UserError, match="choose another output"):
            output_path(Path(path))
