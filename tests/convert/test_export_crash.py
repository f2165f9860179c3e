"""An export that is killed at any moment leaves no folder, the old one or a complete one, and can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltanet_convert.export import gguf
from deltanet_convert.export.stream_export import write_export
from deltanet_hf.errors import UserError
from support.tiny_export import EVERY_OTHER, exportable_model, exported, planned, saved

ROOT = Path(__file__).resolve().parents[2]


class Killed(BaseException):
    """Stands for SIGKILL: no code may catch it and clean up."""


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(exportable_model("qwen3", EVERY_OTHER), tmp_path / "model")


def run(source: Path, out: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    plan = planned(source, shard_size=30_000)
    write_export(plan, out, "transformers", resume=resume, overwrite=overwrite, progress=lambda done, total: None)


@pytest.mark.parametrize(
    ("what", "mode", "points", "visible"),
    [
        ("export", "fresh", 8, {"absent", "complete"}),
        pytest.param("export", "twice", 4, {"absent", "complete"}, marks=pytest.mark.slow),
        pytest.param("export", "overwrite", 4, {"old", "absent", "complete"}, marks=pytest.mark.slow),
        pytest.param("gguf", "fresh", 5, {"absent", "complete"}, marks=pytest.mark.slow),
        ("gguf", "overwrite", 4, {"old", "complete"}),
    ],
)
def test_killed_exports_resume_to_the_same_bytes(
    what: str, mode: str, points: int, visible: set[str], tmp_path: Path
) -> None:
    """A separate process gets SIGKILL before or after calls that change the disk; the last ones are all tried."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "convert", "recipes", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "support.kill_points", what, mode, str(tmp_path), str(points)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["calls"] > 40
    assert len(result["points"]) >= points
    for point in result["points"]:
        assert point["killed"], (point, done.stderr)
        assert point["visible"] in visible, point
        if point["resumed"] != 0:  # only a complete file was left, with nothing to resume
            assert (what, point["resumed"], point["visible"]) == ("gguf", 2, "complete"), (point, done.stderr)
        assert point["identical"], point
        assert point["left behind"] == [], point
    seen = {point["visible"] for point in result["points"]}
    assert len(seen) > 1  # points before and after the publication were tried
    if what == "export" and mode == "overwrite":  # the old folder is absent only between two renames
        assert sum(point["visible"] == "absent" for point in result["points"]) <= 2
    if mode == "twice":
        assert any(point["killed again"] for point in result["points"])


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
