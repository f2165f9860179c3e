"""An export killed at any moment leaves nothing, the old folder or a complete one, and can be completed."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from deltanet_convert.export.stream_export import write_export
from deltanet_hf.errors import UserError
from tiny_export import EVERY_OTHER, exported, native_model, planned, saved


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it and tidy up."""


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(native_model("qwen3", EVERY_OTHER), tmp_path / "model")


def run(source: Path, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    plan = planned(source, shard_size=30_000)
    write_export(plan, out, "transformers", resume=resume, overwrite=overwrite, progress=lambda done, total: None)


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_many_points(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    out = tmp_path / "out"
    wanted = digest(exported(source, tmp_path / "wanted", shard_size=30_000))
    real = {name: getattr(os, name) for name in ("fsync", "replace", "pwrite")}
    calls = 0

    def dying_after(limit: int) -> None:
        nonlocal calls
        calls = 0
        for name, function in real.items():

            def counted(*args: object, function: object = function, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                if calls == limit:
                    raise Killed
                return function(*args, **kwargs)  # type: ignore[operator]

            monkeypatch.setattr(os, name, counted)

    dying_after(0)
    run(source, tmp_path / "counted")
    total = calls
    assert total > 60
    for limit in [*range(1, total - 6, total // 8), *range(total - 6, total + 1)]:
        monkeypatch.undo()
        old = None
        if overwrite:
            run(source, out, overwrite=out.exists())
            (out / "mark").write_text("old")
            old = digest(out)
        dying_after(limit)
        with pytest.raises(Killed):
            run(source, out, overwrite=overwrite)
        monkeypatch.undo()
        found = digest(out) if out.exists() else None
        assert found in ([None, old, wanted] if overwrite else [None, wanted])
        run(source, out, resume=True, overwrite=overwrite)
        assert digest(out) == wanted
        assert not list(tmp_path.glob(".*"))
        if not overwrite:
            shutil.rmtree(out)


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
    saved(native_model("qwen3", EVERY_OTHER, rms_norm_eps=1e-4), source)
    with pytest.raises(UserError, match="had another"):
        run(source, tmp_path / "out", resume=True)
    run(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").exists()
