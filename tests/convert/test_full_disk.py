"""Disks that fill up at any write of conversions and exports, also at those of libraries; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltanet_convert import conversion as convert_module
from deltanet_convert import output_files, teacher_model
from deltanet_convert.activations import Activations
from deltanet_convert.export import stream_export
from deltanet_convert.export.stream_export import write_export
from deltanet_convert.storage.shard_writer import ShardWriter
from deltanet_hf.errors import UserError
from deltanet_hf.journal import Journal
from support.file_limit import limit_during
from support.tiny_conversion import digest, teacher_folder, tiny_conversion, tiny_tokenizer
from support.tiny_export import EVERY_OTHER, exportable_model, planned, saved

# The function that writes, the largest size of its files meanwhile, and the calls that go well before.
CONVERSION: list[tuple[Any, str, int, int]] = [
    (Journal, "begin", 10, 0),
    (ShardWriter, "prepare", 100, 0),
    (ShardWriter, "prepare", 10_000, 0),
    (Activations, "save", 1000, 0),
    (Activations, "save", 1000, 1),
    (Journal, "done", 1500, 1),
    (teacher_model, "check_saving", 10, 0),  # a trial in the folder for temporary files
    (teacher_model, "generation_config", 10, 0),
    (convert_module, "write_other_files", 10, 0),  # config.json
    (convert_module, "write_other_files", 2500, 0),  # the tokenizer
    (output_files, "write_atomically", 100, 0),  # the card
    (output_files, "write_atomically", 100, 1),  # conversion.json
]
EXPORT: list[tuple[Any, str, int, int]] = [
    (Journal, "begin", 10, 0),
    (ShardWriter, "prepare", 500, 0),
    (Journal, "done", 900, 1),
    (stream_export, "write_companions", 20, 0),
    (stream_export, "write_companions", 2500, 0),  # the tokenizer
    (stream_export, "write_atomically", 20, 0),  # export.json
    (stream_export, "name_for_mlx", 100, 0),
]


def interrupt(
    writes: list[tuple[Any, str, int, int]], out: Path, run: Callable[[bool], object], patch: pytest.MonkeyPatch
) -> None:
    """Runs `run(resume)` once per write, which finds a full disk, and once more."""
    for owner, name, size, before in writes:
        with patch.context() as limited:
            limit_during(limited, owner, name, size, before)
            with pytest.raises(UserError, match=r"^[^\n]*the disk is full[^\n]*$") as caught:
                run(True)
        assert str(out.parent) in str(caught.value) or "TMPDIR" in str(caught.value), (name, size)
        assert not out.exists()
        assert not [path for path in out.parent.rglob("*.partial")], name
    run(True)


@pytest.mark.usefixtures("quick_fit")
def test_conversions_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", num_hidden_layers=2)
    out = tmp_path / "out"
    interrupt(CONVERSION, out, lambda resume: tiny_conversion(teacher, out, resume=resume), monkeypatch)
    tiny_conversion(teacher, tmp_path / "direct")
    assert digest(out) == digest(tmp_path / "direct")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_exports_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(exportable_model("qwen3", EVERY_OTHER), tmp_path / "model")
    tiny_tokenizer().save_pretrained(source)
    out = tmp_path / "out"

    def run(resume: bool, to: Path = out) -> None:
        plan = planned(source, shard_size=30_000)
        write_export(plan, to, "mlx", resume=resume, overwrite=False, progress=lambda done, total: None)

    interrupt(EXPORT, out, run, monkeypatch)
    run(False, tmp_path / "direct")
    assert digest(out) == digest(tmp_path / "direct")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
