"""A training run in processes of its own, which can be watched and killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # a dependency of accelerate

from deltanet_hf.errors import UserError

POLL = 0.5  # seconds


def train_command(recipe: Path | str, changes: list[str], processes: int) -> list[str]:
    """The command that runs a recipe with overrides on so many GPUs (or CPU processes)."""
    training = ["-m", "deltanet_recipes.distill", str(recipe), *changes]
    if processes == 1:
        return [sys.executable, *training]
    launch = ["-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1"]
    return [sys.executable, *launch, "--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no", *training]


class TrainingProcess:
    """One start of a run.

    Args:
        command: from `train_command`.
        log: file to which its output is appended.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def watch(self, look: Callable[[], bool]) -> bool:
        """Call `look` every half second until it returns True, or the run ends; returns whether `look` did.

        Raises UserError with the last line of the output if the run fails. However this ends but by `look`, no process
        is left.
        """
        try:
            while True:
                ended = self._process.poll() is not None
                if look():
                    return True
                if ended:
                    break
                time.sleep(POLL)
        except BaseException:
            self.kill()
            raise
        if self._process.returncode:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            last = next((line for line in reversed(lines) if "Error" in line or "error:" in line), "no output")
            raise UserError(f"training ended with exit code {self._process.returncode}: {last}; see {self.log}")
        return False

    def kill(self) -> None:
        """End the run with all its processes at once, by SIGKILL."""
        try:
            family = [*psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        self._process.send_signal(signal.SIGKILL)
        for child in family:
            if child.is_running():
                child.kill()
        psutil.wait_procs(family, timeout=60)
        self._process.wait()
