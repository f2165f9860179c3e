"""Selections that are killed, repeated with other options, or made by `convert --layers auto:...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltanet_convert import job
from deltanet_convert.select import for_convert, read_selection, run
from deltanet_convert.select.journal import SelectionJournal
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from support.far_model import FAR_LAYER
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion, tiny_job
from support.tiny_selection import QUICK, Killed, tiny_selection, tiny_task

pytestmark = pytest.mark.usefixtures("short_selection")


def killed_after(
    rounds: int,
    teacher: Path,
    out: Path,
    error: type[BaseException] = Killed,
    seen: type[BaseException] = Killed,
    **options: Any,
) -> None:
    """Runs a selection of three layers that an error ends after `rounds` rounds, `seen` as another one."""
    done = SelectionJournal.round_done

    def record(self: SelectionJournal, number: int, found: Any) -> None:
        done(self, number, found)
        if number == rounds:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectionJournal, "round_done", record)
        with pytest.raises(seen):
            tiny_selection(teacher, out, "3", **options)


def test_kept_heads_are_scored_with_the_positions_that_they_will_have(tmp_path: Path) -> None:
    teacher, options = teacher_folder(tmp_path / "teacher", "llama"), {"unit": "kv_head", "method": "kl"}
    own = tiny_selection(teacher, tmp_path / "own.json", **options)
    further = tiny_selection(teacher, tmp_path / "further.json", context="512", **options)
    assert further.settings == {**own.settings, "context": 512}
    assert further.scores["rounds"][0]["gains"] != own.scores["rounds"][0]["gains"]


@pytest.mark.parametrize("method", ["forward", "gradient"])
def test_finished_rounds_are_not_repeated(far: Path, tmp_path: Path, method: str) -> None:
    whole = tiny_selection(far, tmp_path / "whole.json", "3", method=method)
    out = tmp_path / "s.json"
    killed_after(2, far, out, method=method)
    journal = SelectionJournal.path_of(out)
    assert not out.exists()
    assert [json.loads(line).get("step") for line in journal.read_text().splitlines()][1:] == [
        "references",
        "round 1",
        "round 2",
    ]
    lines: list[str | None] = []
    found = run.run_selection(tiny_task(far, "3", method=method), out, lambda done, total, line: lines.append(line))
    assert found == whole
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    said = [line for line in lines if line]
    assert said[0] == "continued after round 2"
    assert [line[:4] for line in said[1:]] == ["3/3:"]
    assert not journal.exists()


def test_too_little_memory_is_an_error_and_finished_rounds_stay(far: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    killed_after(2, far, out, torch.OutOfMemoryError, UserError)
    assert len(SelectionJournal.path_of(out).read_text().splitlines()) == 4
    assert tiny_selection(far, out, "3") == tiny_selection(far, tmp_path / "whole.json", "3")


def test_too_little_memory_for_the_first_losses_leaves_no_file(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(run.References, "measure", fails)
    with pytest.raises(UserError, match=r"memory is too small to measure the teacher; .* or --device cpu$"):
        tiny_selection(far, tmp_path / "s.json", "3")
    assert not SelectionJournal.path_of(tmp_path / "s.json").exists()


def test_another_request_is_refused_or_starts_again(far: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    killed_after(1, far, out)
    with pytest.raises(UserError, match=r"selection to .*s.json with another seed \(0, now 1\); start again"):
        tiny_selection(far, out, "3", seed=1)
    assert tiny_selection(far, out, "1", seed=1, overwrite=True).layers == (FAR_LAYER,)
    killed_after(1, far, out, overwrite=True)
    journal = SelectionJournal.path_of(out)
    with journal.open("ab") as stream:
        stream.write(b'{"step": "round 2", "fig')  # a line that the crash cut
    assert FAR_LAYER in tiny_selection(far, out, "3").layers
    journal.write_bytes(b"nonsense\n")
    with pytest.raises(UserError, match=r"\.s\.json\.journal: damaged"):
        tiny_selection(far, out, "1")
    tiny_selection(far, out, "1", overwrite=True)
    with pytest.raises(UserError, match="is a folder"):
        tiny_selection(far, tmp_path, "1")


@pytest.fixture
def quick_auto(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the selections of `convert` as short as those of these tests; returns the list of those that ran."""
    ran: list[int] = []
    monkeypatch.setattr(for_convert, "SelectOptions", lambda **kw: SelectOptions(**{**QUICK, **kw}))
    start = for_convert.run_selection

    def counted(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return start(*args, **kwargs)

    monkeypatch.setattr(for_convert, "run_selection", counted)
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    return ran


def test_convert_chooses_and_records_the_layers(far: Path, tmp_path: Path, quick_auto: list[int]) -> None:
    out = tmp_path / "out"
    report = tiny_conversion(far, out, layers="auto:1")
    assert report["selection"]["kept"] == [FAR_LAYER]
    assert json.loads((out / "conversion.json").read_text())["selection"]["kept"] == [FAR_LAYER]
    assert json.loads((out / "config.json").read_text())["deltanet"]["layers"][FAR_LAYER] == "softmax"
    assert (out / "selection.png").exists()
    assert not for_convert.selection_path(out).exists()
    assert tiny_conversion(far, out, layers="auto:1", resume=True) == report
    assert len(quick_auto) == 1
    with pytest.raises(UserError, match="exists; choose another folder"):
        tiny_job(far, out, layers="auto:1")
    assert len(quick_auto) == 1
    assert tiny_conversion(far, out, layers="auto:50%", overwrite=True)["selection"]["budget"] == "50%"
    assert len(quick_auto) == 2


def test_an_interrupted_conversion_does_not_select_again(
    far: Path, tmp_path: Path, quick_auto: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    calls = []

    def dies(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        return quick_start(*args, **kwargs)

    monkeypatch.setitem(START, "gated_deltanet", dies)
    with pytest.raises(Killed):
        tiny_conversion(far, out, layers="auto:1")
    assert read_selection(for_convert.selection_path(out)).layers == (FAR_LAYER,)
    report = tiny_conversion(far, out, layers="auto:1", resume=True)
    assert report["selection"]["kept"] == [FAR_LAYER]
    assert len(quick_auto) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_automatic_budgets_that_make_no_sense_are_refused(far: Path, tmp_path: Path, quick_auto: list[int]) -> None:
    wrong = {"auto:4": "keeps all 4 units", "auto:0.5": "expected a number", "auto:1KB@600": "too few bytes"}
    for layers, message in wrong.items():
        with pytest.raises(UserError, match=f"--keep .*{message}"):
            job.prepare(str(far), tmp_path / "out", job.ConvertOptions(layers=layers, mixer="window"))
    assert quick_auto == []


@pytest.mark.gpu
def test_a_gpu_chooses_the_same(far: Path, tmp_path: Path) -> None:
    for method in ("forward", "gradient", "kl"):
        found = tiny_selection(far, tmp_path / f"{method}.json", "1", method=method, device="cuda")
        assert found.layers == (FAR_LAYER,)
