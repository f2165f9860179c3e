"""Two processes that convert into one folder: the second ends with one line, the first finishes as if it were alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltanet_convert.convert_command import convert_command
from deltanet_convert.job import sole_conversion
from deltanet_hf.errors import UserError
from support.tiny_conversion import digest, text_file
from support.tiny_gguf import write_gguf


def test_a_second_conversion_keeps_off_what_the_first_is_preparing(tmp_path: Path) -> None:
    """The copy of a GGUF teacher is written before the folder that `publish_folder` locks."""
    write_gguf(tmp_path / "teacher.gguf")
    copy = tmp_path / ".out.teacher"
    with sole_conversion(tmp_path / "out"):
        copy.mkdir()
        (copy / "model.safetensors.tmp").touch()
        with pytest.raises(UserError, match=r"another conversion to .*out is running; wait for it"):
            convert_command(str(tmp_path / "teacher.gguf"), tmp_path / "out", pure=True)
        assert [file.name for file in copy.iterdir()] == ["model.safetensors.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["teacher.gguf"]


@pytest.mark.slow
def test_two_processes_convert_into_one_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "teacher.gguf")
    text = text_file(tmp_path)

    def start(out: str) -> subprocess.Popen[str]:
        options = ["--pure", "--text", str(text), "--calibration-tokens", "64", "--device", "cpu"]
        return subprocess.Popen(
            [sys.executable, "-m", "deltanet_recipes.cli", "convert", str(tmp_path / "teacher.gguf"), out, *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )

    first = start("out")
    while not (tmp_path / ".out.teacher").exists():  # which it writes when it has locked
        assert first.poll() is None, first.communicate()
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    second = start("out")
    _, errors = second.communicate(timeout=100)
    assert second.returncode == 2
    assert errors.startswith("error: ")
    assert "another conversion to" in errors
    assert errors.count("\n") == 1
    first.send_signal(signal.SIGCONT)
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 0, errors
    assert start("direct").wait(timeout=100) == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "direct")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
