"""Runs the programs that models write, in the place of the metric `code_eval` of the package `evaluate`.

lm-eval's tasks HumanEval and MBPP load that metric from the Hub. Here each program has a process of its own
(`answer_process.py`), and no network is needed. Prompts, and what of an answer is run, are lm-eval's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import evaluate

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks import answer_process
from deltanet_hf.evaluation.tasks.lm_eval_patches import replaced
from deltanet_hf.evaluation.tasks.suites import ALLOW_CODE, code_allowed

SECONDS = 10.0  # of a program; in the 3 of `code_eval`, one solution that MBPP itself gives does not end on a busy core


class CodeEval:
    """The metric: `compute` as in `evaluate`."""

    def compute(
        self, references: list[str], predictions: list[list[str]], k: list[int]
    ) -> tuple[dict[str, float], list[list[bool]]]:
        """Run each of the programs with its tests.

        Args:
            references: tests, one program text per task.
            predictions: the model's programs for each task.
            k: numbers of programs of which one has to pass, none above that of the programs.

        Returns:
            `pass@K` (arXiv 2107.03374, equation 1) for each of `k`, and which programs passed.

        Raises:
            UserError: the environment does not allow it.
        """
        if not code_allowed():
            raise UserError(f"programs that a model writes are run if {ALLOW_CODE}=1 is set, best in a container")
        right = [
            [passes(f"{program}\n{tests}") for program in programs]
            for tests, programs in zip(references, predictions, strict=True)
        ]
        found = {f"pass@{n}": fmean(1 - comb(row.count(False), n) / comb(len(row), n) for row in right) for n in k}
        return found, right


def passes(program: str) -> bool:
    """Whether a program comes to its end within `SECONDS`, without an exception."""
    with tempfile.TemporaryDirectory(prefix="deltanet-answer-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-B", str(Path(answer_process.__file__).resolve())],
                input=program.encode(),
                cwd=folder,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # no secrets, and no memory for threads
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == answer_process.PASSED


def code_runs_here() -> AbstractContextManager[None]:
    """Let `evaluate.load("code_eval")` give `CodeEval` inside the block; lm-eval calls it as it loads a task."""
    stock = evaluate.load

    def load(path: str, *args: Any, **kwargs: Any) -> Any:
        return CodeEval() if path == "code_eval" else stock(path, *args, **kwargs)

    return replaced(evaluate, "load", load)
