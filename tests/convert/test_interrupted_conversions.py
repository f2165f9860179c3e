"""Conversions that are killed, hit a full disk, or are repeated with other options leave nothing broken or lost."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deltanet_convert.start import START
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.publish import Workspace
from support.tiny_conversion import digest, quick_start, teacher_folder, tiny_conversion
from support.tiny_selection import selection_file

pytestmark = pytest.mark.usefixtures("quick_fit")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_folder(tmp_path_factory.mktemp("teacher"), "llama", num_hidden_layers=2)


class Stop(Exception):
    """An interruption after which no code cleans up."""


def stopped(teacher: Path, out: Path, **options: Any) -> None:
    """A conversion that stops after its first layer."""
    done = Workspace.done

    def stop(self: Workspace, step: str, figures: dict[str, Any] | None = None) -> None:
        done(self, step, figures)
        if step == "layer 0":
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "done", stop)
        with pytest.raises(Stop):
            tiny_conversion(teacher, out, **options)


@pytest.fixture
def interrupted(teacher: Path, tmp_path: Path) -> Path:
    """The output path of a conversion that stopped after its first layer."""
    stopped(teacher, tmp_path / "out")
    return tmp_path / "out"


def test_resume_skips_finished_layers_and_gives_the_same_bytes(
    teacher: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fitted: list[int] = []

    def count(attention: Any, layer: Any, calibration: Any) -> Any:
        fitted.append(layer.layer_idx)
        return quick_start(attention, layer, calibration)

    monkeypatch.setitem(START, "gated_deltanet", count)
    assert not interrupted.exists()
    report = tiny_conversion(teacher, interrupted, resume=True)
    assert fitted == [1]
    assert tiny_conversion(teacher, tmp_path / "direct") == report
    assert digest(tmp_path / "direct") == digest(interrupted)


def test_a_start_that_is_not_finite_names_its_layer_and_keeps_those_before_it(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(attention: Any, layer: Any, calibration: Any) -> Any:
        figures = quick_start(attention, layer, calibration)
        if layer.layer_idx == 1:
            with torch.no_grad():
                layer.a_proj.weight.fill_(torch.nan)
        return figures

    with monkeypatch.context() as patch:
        patch.setitem(START, "gated_deltanet", broken)
        with pytest.raises(QualityError, match=r"^layer 1: the start values of a_proj.weight are not finite"):
            tiny_conversion(teacher, tmp_path / "out")
    tiny_conversion(teacher, tmp_path / "out", resume=True)
    tiny_conversion(teacher, tmp_path / "direct")
    assert digest(tmp_path / "direct") == digest(tmp_path / "out")


def test_overwrite_discards_an_interrupted_conversion(teacher: Path, interrupted: Path) -> None:
    report = tiny_conversion(teacher, interrupted, overwrite=True, seed=5)
    assert report["options"]["seed"] == 5
    assert [file.name for file in interrupted.parent.iterdir() if file.name.startswith(".")] == []


def test_other_inputs_cannot_resume(teacher: Path, interrupted: Path, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text("Another text altogether. " * 200)
    other = shutil.copytree(teacher, tmp_path / teacher.name)
    os.utime(other / "model.safetensors", ns=(0, 0))
    inputs: list[tuple[dict[str, Any], str]] = [
        ({"seed": 3}, r"options\.seed"),
        ({"profile": "qwen3_5"}, r"options\.profile"),
        ({"layers": "keep:1"}, r"options\.table\.layers"),
        ({"dtype": "bfloat16"}, r"options\.dtype"),
        ({"shard_size": 1000}, r"options\.shard_size"),
        ({"calibration_tokens": 128}, r"options\.calibration_tokens"),
        ({"changes": ("rope=false",)}, r"options\.set\.rope"),
        ({"text": text}, r"text\.sha256"),
        ({"teacher": other}, r"teacher\.files\.model\.safetensors"),
    ]
    for changes, named in inputs:
        with pytest.raises(UserError, match=f"holds an interrupted conversion to .* with another {named} "):
            tiny_conversion(**{"teacher": teacher, "out": interrupted, "resume": True, **changes})
    tiny_conversion(teacher, interrupted, resume=True)


def test_another_planned_window_cannot_resume(teacher: Path, tmp_path: Path) -> None:
    """The same file of `select` with another window: no weight depends on it, but the figures of layers do."""
    out = tmp_path / "out"

    def plan(window: int) -> dict[str, Any]:
        keys: dict[str, Any] = {"num_hidden_layers": 2, "unit": "layer", "kept": [1], "planned_windows": [window] * 2}
        return {"layers": selection_file(tmp_path, **keys), "mixer": "window"}

    stopped(teacher, out, **plan(33))
    with pytest.raises(UserError, match=r"another options\.table\.kinds\.local_33 \(\{.*'window': 33.*, now None\)"):
        tiny_conversion(teacher, out, **plan(65), resume=True)
    assert tiny_conversion(teacher, out, **plan(33), resume=True)["options"]["keep"] == str(tmp_path / "selection.json")


def test_damaged_activations_are_reported(teacher: Path, interrupted: Path) -> None:
    """The file is cut, or one of its bits is changed."""
    file = interrupted.parent / ".out.incomplete" / "activations-1.bin"
    whole = file.read_bytes()
    for place in (None, 0, 5000, -1):
        data = bytearray(whole)
        if place is None:
            del data[100:]
        else:
            data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(UserError, match="damaged or missing"):
            tiny_conversion(teacher, interrupted, resume=True)


def test_resume_with_nothing_to_resume_starts(teacher: Path, tmp_path: Path) -> None:
    report = tiny_conversion(teacher, tmp_path / "out", resume=True)
    assert tiny_conversion(teacher, tmp_path / "out", resume=True) == report  # complete: nothing happens


def test_existing_target_is_kept(teacher: Path, tmp_path: Path) -> None:
    tiny_conversion(teacher, tmp_path / "out")
    before = digest(tmp_path / "out")
    with pytest.raises(UserError, match=r"out: exists; .*--overwrite"):
        tiny_conversion(teacher, tmp_path / "out", seed=1)
    assert digest(tmp_path / "out") == before
    assert not (tmp_path / ".out.incomplete").exists()
    report = tiny_conversion(teacher, tmp_path / "out", seed=1, overwrite=True)
    assert report["options"]["seed"] == 1
    assert digest(tmp_path / "out") != before


def test_empty_target_folder_is_used(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    tiny_conversion(teacher, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_overwrite_never_deletes_what_is_no_model(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match="holds no model"):
        tiny_conversion(teacher, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "irreplaceable"


def test_target_that_overlaps_the_teacher(teacher: Path) -> None:
    for out in (teacher, teacher / "out", teacher.parent):
        with pytest.raises(UserError, match="overlaps the teacher"):
            tiny_conversion(teacher, out, overwrite=True, text=None)
    assert (teacher / "model.safetensors").exists()


def test_too_little_disk_is_noticed_first(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"needs 0\.07 GB but its disk has 0\.00 GB free"):
        tiny_conversion(teacher, tmp_path / "out")
    assert not (tmp_path / ".out.incomplete").exists()


def test_read_only_target(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    text = tmp_path / "text.txt"
    text.write_text("Some words to measure with. " * 200)
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr("support.tiny_conversion.text_file", lambda folder: text)
    with pytest.raises(UserError, match="cannot be written"):
        tiny_conversion(teacher, tmp_path / "out")
