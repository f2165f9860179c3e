"""Damaged journals, outputs in the way, and teachers that cannot be measured: one line each, and no work lost."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deltanet_convert.select import objectives, probes
from deltanet_convert.select.journal import SelectionJournal
from deltanet_convert.select.probe_text import FORMATS
from deltanet_hf.errors import UserError
from support.far_model import far_teacher
from support.tiny_conversion import teacher_folder, tiny_tokenizer
from support.tiny_models import tiny_teacher
from support.tiny_selection import tiny_selection, tiny_task

REQUEST = {"seed": 0}
UNITS = [(0,), (1,)]
LOSSES: dict[str, Any] = {"teacher": {"a": 1}, "windows": {"a": 2}, "dropped": {}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CHARACTERS", 2000)
    monkeypatch.setattr(objectives, "selection_probes", partial(probes.selection_probes, formats=FORMATS[:1]))


def chosen(number: int, unit: Any, score: float = 0.5) -> dict[str, Any]:
    return {"step": f"round {number}", "figures": {"unit": unit, "score": score, "gains": []}}


def journal(out: Path, *lines: Any, overwrite: bool = False) -> SelectionJournal:
    """The journal of a run whose file has these lines after its request; bytes stand for a whole file."""
    if lines and isinstance(lines[0], bytes):
        data = lines[0]
    else:
        data = "".join(json.dumps(line) + "\n" for line in ({"request": REQUEST}, *lines)).encode()
    SelectionJournal.path_of(out).write_bytes(data)
    return SelectionJournal(out, REQUEST, overwrite, UNITS)


DAMAGED: list[tuple[Any, ...]] = [
    (b'{"request": 5}\n',),
    (b'{"request": []}\n',),
    (b"[]\n",),
    (b"\xff\xfe\n",),
    (b"[" * 100_000 + b"\n",),
    ([1],),
    ({"step": "references", "figures": {}},),
    ({"step": "references", "figures": {"teacher": {}, "windows": {}, "dropped": {}}},),
    ({"step": "round 1"},),
    ({"step": "round 1", "figures": {}},),
    (chosen(1, 7),),
    (chosen(1, "a"),),
    (chosen(1, 1), chosen(2, 1)),
    (chosen(2, 1),),
    (chosen(1, 1, math.nan),),
]


def test_a_damaged_journal_is_refused_and_can_be_discarded(tmp_path: Path) -> None:
    for number, lines in enumerate(DAMAGED):
        out = tmp_path / str(number) / "s.json"
        out.parent.mkdir()
        with pytest.raises(UserError, match=r"\.s\.json\.journal: damaged, .*; start again with --overwrite") as caught:
            journal(out, *lines)
        assert "\n" not in str(caught.value), lines
        assert journal(out, *lines, overwrite=True).steps == {}, lines


def test_a_journal_cut_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    lines = [{"request": REQUEST}, {"step": "references", "figures": LOSSES}, chosen(1, 1), chosen(2, 0)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    for end in range(0, len(data) + 1, 7):
        found = journal(tmp_path / "s.json", data[:end])
        whole = data[:end].count(b"\n")
        assert len(found.steps) == max(0, whole - 1)
        assert [step.unit for step in found.rounds()] == [(1,), (0,)][: max(0, whole - 2)]
        assert (found.references() is None) == (whole < 2)


def test_outputs_in_the_way_are_found_before_the_work(far: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "plot.png").write_bytes(b"mine")
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("file/s.json", r"file/s.json: cannot be written \(File exists\); choose another output"),
        ("x" * 300, r"xxx: cannot be written \(File name too long\)"),
        ("x" * 250, r"xxx: cannot be written \(File name too long\)"),
        ("plot.json", r"plot.png: exists; choose another file, or add --overwrite"),
        ("folder.json", r"folder.png: is a folder"),
    ):
        with pytest.raises(UserError, match=message):
            tiny_selection(far, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png", "plot.png"]
    assert (tmp_path / "plot.png").read_bytes() == b"mine"


def test_a_folder_that_may_not_be_written_to(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def denied(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match=r"journal: cannot be written \(Permission denied\); choose an output folder"):
        tiny_selection(far, tmp_path / "s.json", method="uniform")


def test_a_teacher_that_cannot_be_measured_leaves_no_journal(tmp_path: Path) -> None:
    """The command that the message advises would be refused beside it."""
    model = far_teacher()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(math.nan)
    model.save_pretrained(tmp_path / "broken")
    tiny_teacher("llama", max_position_embeddings=512).save_pretrained(tmp_path / "random")
    for name, message in (("broken", "its loss on the probes is not a number"), ("random", "choose --method kl")):
        tiny_tokenizer().save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=message):
            tiny_selection(tmp_path / name, tmp_path / "s.json")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "random"]


def test_a_window_that_shows_whole_probes_is_refused(far: Path, tmp_path: Path) -> None:
    options: dict[str, int]
    for options in ({"window": 399}, {"window": 6, "sinks": 394}, {"window": 10**9}):
        with pytest.raises(UserError, match=r"--window \d+: with \d+ sinks it shows all 400 tokens of a probe"):
            tiny_selection(far, tmp_path / "s.json", **options)
        assert tiny_task(far, method="uniform", **options).count == 1
    assert not list(tmp_path.iterdir())


def test_what_no_runtime_could_read_is_not_exportable(tmp_path: Path) -> None:
    for family, message in {
        "phi3": "family: a phi3 decoder layer has norms",
        "gemma3_text": "family: a gemma3_text decoder layer",
        "llama": "attention_bias: the teacher's output projection has a bias",
        "mistral": r"kept layers \[1, 3\] attend within a sliding window",
    }.items():
        tiny_teacher(family).save_pretrained(tmp_path / family)
        with pytest.raises(UserError, match=f"--exportable: the result could not be exported: .*{message}") as caught:
            tiny_selection(tmp_path / family, tmp_path / "s.json", "50%", exportable=True)
        assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_heads_that_cannot_be_told_apart_are_not_chosen(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "olmo2")
    with pytest.raises(UserError, match="choose whole layers"):
        tiny_selection(teacher, tmp_path / "s.json", unit="kv_head", method="uniform")


def test_bytes_of_mixers_that_keep_everything_leave_nothing_to_choose(far: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no larger than the cache in its place .*--mixer with a state or a window"):
        tiny_task(far, "50%@4000", mixer="alibi", cache_bits=16)
