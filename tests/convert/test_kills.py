"""A conversion, export, selection or training run that is killed at any moment resumes to the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRESH, REPLACED = {"absent", "complete"}, {"old", "absent", "complete"}
IN_PLACE = {"absent", "broken", "complete"}


@pytest.fixture(scope="module")
def kill() -> Iterator[Callable[[str, str, int, Path], Any]]:
    """Kills work of a kind in a mode at so many points, and returns the findings. One process imports for all."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "convert", "recipes", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "support.kill_points"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None

        def findings(what: str, mode: str, points: int, folder: Path) -> Any:
            print(what, mode, points, folder, file=questions, flush=True)
            return json.loads(answers.readline())

        yield findings


@pytest.mark.parametrize(
    ("what", "mode", "points", "calls", "visible"),
    [
        ("convert", "fresh", 12, 80, FRESH),
        pytest.param("convert", "twice", 6, 80, FRESH, marks=pytest.mark.slow),
        ("convert", "overwrite", 5, 80, REPLACED),
        ("export", "fresh", 8, 40, FRESH),
        pytest.param("export", "twice", 4, 40, FRESH, marks=pytest.mark.slow),
        pytest.param("export", "overwrite", 4, 40, REPLACED, marks=pytest.mark.slow),
        pytest.param("gguf", "fresh", 5, 40, FRESH, marks=pytest.mark.slow),
        pytest.param("gguf", "overwrite", 4, 40, {"old", "complete"}, marks=pytest.mark.slow),
        ("select", "fresh", 4, 20, FRESH),
        pytest.param("select", "overwrite", 2, 20, REPLACED, marks=pytest.mark.slow),
        pytest.param("train", "fresh", 15, 150, IN_PLACE, marks=pytest.mark.slow),
    ],
)
def test_killed_work_resumes_to_the_same_bytes(
    what: str, mode: str, points: int, calls: int, visible: set[str], kill: Callable[..., Any], tmp_path: Path
) -> None:
    """SIGKILL comes before or after calls that change the disk; the last ones are all tried."""
    result = kill(what, mode, points, tmp_path)
    assert result["calls"] > calls
    assert len(result["points"]) >= points
    for point in result["points"]:
        assert point["killed"], point
        assert point["visible"] in visible, point
        # The journal is removed by the last call but one, after which nothing is left to do: the file exists.
        finished = what == "select" and mode == "fresh" and point["point"] >= result["calls"] - 1
        if what == "gguf" and point["resumed"] != 0:
            finished = point["visible"] == "complete"
        assert point["resumed"] == (2 if finished else 0), point  # 2: a complete file, with nothing to resume
        assert point["identical"], point
        assert point["left behind"] == [], point
    assert len({point["visible"] for point in result["points"]}) > 1  # some points are before the publication
    if mode == "overwrite" and "absent" in visible:  # the old folder is absent only between two renames
        assert sum(point["visible"] == "absent" for point in result["points"]) <= 2
    if mode == "twice":
        assert any(point["killed again"] for point in result["points"])
