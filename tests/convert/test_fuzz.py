"""Damaged files: 2,000 cases over configs, headers, GGUF files, recipes, layer files, indices and tokenizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_damaged_files_end_with_one_clear_line() -> None:
    """Runs as a process of its own, because it replaces the fit by a quick start."""
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [sys.executable, "-m", "support.fuzz", "2000"], capture_output=True, text=True, env=paths, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout[run.stdout.index("{") :])
    assert found["wrong"] == []
    assert sum(found["refused"].values()) > 1000
    assert min(found["accepted"].values()) > 0
