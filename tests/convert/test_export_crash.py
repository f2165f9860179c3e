"""An export that is killed at any moment leaves no folder, the old one or a complete one, and can be resumed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltanet_convert.export import gguf
from deltanet_convert.export.stream_export import write_export
from deltanet_hf.errors import UserError
from support.tiny_conversion import digest
from support.tiny_export import EVERY_OTHER, exportable_model, exported, planned, saved


class Killed(BaseException):
    """Stands for SIGKILL: no code may catch it and clean up."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(exportable_model("qwen3", EVERY_OTHER), tmp_path / "model")


def run(source: Path, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    plan = planned(source, shard_size=30_000)
    write_export(plan, out, "transformers", resume=resume, overwrite=overwrite, progress=lambda done, total: None)


def test_existing_output_is_kept_unless_told_otherwise(source: Path, tmp_path: Path) -> None:
    out = exported(source, tmp_path / "out")
    before = digest(out)
    with pytest.raises(UserError, match="--overwrite"):
        run(source, out)
    assert digest(out) == before
    run(source, out, overwrite=True)
    assert digest(out) != before  # another shard size


def test_resume_refuses_another_source(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(done: int, total: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        write_export(planned(source), tmp_path / "out", "transformers", resume=False, overwrite=False, progress=killed)
    with pytest.raises(UserError, match="--resume"):
        run(source, tmp_path / "out")
    saved(exportable_model("qwen3", EVERY_OTHER, rms_norm_eps=1e-4), source)
    with pytest.raises(UserError, match=r"another files\.model\.safetensors"):
        run(source, tmp_path / "out", resume=True)
    run(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").exists()


def test_resume_of_a_finished_export_changes_nothing(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    before = digest(tmp_path / "out")
    run(source, tmp_path / "out", resume=True)
    assert digest(tmp_path / "out") == before
    with pytest.raises(UserError, match="--overwrite"):  # another format is another export
        write_export(
            planned(source, shard_size=30_000),
            tmp_path / "out",
            "mlx",
            resume=True,
            overwrite=False,
            progress=lambda done, total: None,
        )
    os.utime(source / "model.safetensors")  # as if trained further with the same shapes
    with pytest.raises(UserError, match="--overwrite"):
        run(source, tmp_path / "out", resume=True)


def test_gguf_resume_refuses_another_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, out = tmp_path / "tools", tmp_path / "out.gguf"
    tools.mkdir()
    (tools / gguf.SCRIPT).write_text("import sys; sys.exit('no memory')")
    monkeypatch.setenv("PATH", str(tools))

    def export(resume: bool) -> None:
        gguf.write_gguf(planned(source), out, "float16", resume=resume, overwrite=False, progress=lambda a, b: None)

    with pytest.raises(UserError, match="no memory"):
        export(resume=False)
    saved(exportable_model("qwen3", EVERY_OTHER, rms_norm_eps=1e-4), source)
    with pytest.raises(UserError, match="leave out --resume"):
        export(resume=True)
