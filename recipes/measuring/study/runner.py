"""Carries out a study, which is a list of runs: `python -m measuring.study STUDY.yaml NAME=VALUE ... --gpus N`.

Each run is distilled and measured on one GPU, in processes of its own; runs with the same conversion share it. The row
of a run is written to the results file before the next run begins on its GPU. The same command, called again, skips
finished runs and continues the others. A run that fails becomes a row with its error and does not stop the others; the
next call tries it again.

Folders: OUTPUT/NAME holds a run, OUTPUT/conversions the converted models, and OUTPUT/logs/NAME.log the output of the
run's processes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from deltanet_hf.errors import UserError
from deltanet_hf.journal import Journal
from deltanet_recipes.cpu_threads import available_cpus
from measuring.rows import Row, RowFile
from measuring.study import mixer_row
from measuring.study.study_config import Conversion, Run, Study, load_study

JOURNAL = "row.json"  # a run's folder holds this file when the run is finished
ROW = "row"  # its one step
CORES_PER_CONVERSION = 6  # the matrices are small: on CPUs, with 64 threads a conversion took several times longer


class Failed(Exception):
    """A process of a run ended with an error, which is the message."""


class StudyRun:
    """Carries out runs of a study, one worker thread per entry of `devices`.

    Args:
        runs: the runs to carry out.
        devices: the GPU of each worker, as a value of CUDA_VISIBLE_DEVICES, or None for the CPU.
        file: name of the study's file, for the commands in rows.

    Raises UserError if a run's folder holds a run with other settings.
    """

    def __init__(self, study: Study, runs: list[Run], devices: list[str | None], file: str = "STUDY.yaml") -> None:
        self.study, self.devices, self.file = study, devices, file
        self.output, self.results = Path(study.output), RowFile(Path(study.results), arranged=self._in_order)
        self.logs = self.output / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.order = [run.name for run in study.runs]
        self.lock = threading.Condition()
        self.waiting = sorted((run for run in runs if not self._finished(run)), key=study.tokens, reverse=True)
        self.conversions = list(dict.fromkeys(self._folder(run.convert) for run in self.waiting if _converts(run)))
        self.options = {self._folder(run.convert): run.convert for run in self.waiting}
        self.converted: dict[Path, str | None] = {}  # the error, or None
        self.idle = Counter(devices)  # workers without a run
        self.load: Counter[str | None] = Counter()  # tokens of the runs on each device
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.stopped = False
        self.failures = 0

    def work(self) -> int:
        """Carry out all runs; returns the number of runs that failed."""
        cores = available_cpus()
        converters = max(1, min(len(self.conversions), cores // CORES_PER_CONVERSION))
        gpus = list(dict.fromkeys(self.devices))
        threads = [threading.Thread(target=self._convert_all, args=(gpus[i % len(gpus)],)) for i in range(converters)]
        threads += [threading.Thread(target=self._run_all, args=(device,)) for device in self.devices]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            with self.lock:
                self.stopped = True
                for process in self.processes:
                    process.terminate()
                self.lock.notify_all()
            for thread in threads:
                thread.join()
            raise
        return self.failures

    def _convert_all(self, device: str | None) -> None:
        threads = min(available_cpus(), CORES_PER_CONVERSION)
        while True:
            with self.lock:
                if not self.conversions or self.stopped:
                    return
                folder = self.conversions.pop(0)
            error = None
            if not (folder / "conversion.json").is_file():
                arguments = ["convert", self.study.teacher, str(folder), *self.options[folder].arguments(), "--resume"]
                try:
                    self._call("deltanet_recipes.cli", arguments, self.logs / f"{folder.name}.log", device, threads)
                except Failed as failure:
                    error = str(failure)
            self.conversion_done(folder, error)

    def conversion_done(self, folder: Path, error: str | None = None) -> None:
        """Let the runs that use the converted model in `folder` begin, or fail with `error`."""
        with self.lock:
            self.converted[folder] = error
            self.lock.notify_all()

    def _run_all(self, device: str | None) -> None:
        while (run := self.next_run(device)) is not None:
            began = time.perf_counter()
            try:
                row = self._run(run, device)
            except Exception as failure:  # whatever went wrong, the other runs continue
                if self.stopped:
                    return
                row = {"run": run.name, "error": str(failure) or repr(failure)}
                with self.lock:
                    self.failures += 1
            row |= {"wall_seconds": round(time.perf_counter() - began, 1), "runs_at_once": self.devices.count(device)}
            with self.lock:
                self.results.add(row)
                self.idle[device] += 1
                self.load[device] -= self.study.tokens(run)
                self.lock.notify_all()
            if "error" not in row:
                self._finish(run, row)
            typer.echo(f"{run.name}: {row.get('error') or mixer_row.shown(row)} ({row['wall_seconds']:.0f} s)")

    def next_run(self, device: str | None) -> Run | None:
        """Take the longest waiting run, or None if no run is left.

        Blocks until its conversion is done, and while an idle worker has a device with fewer tokens to train. A shorter
        run that began in the meantime would hold a device for much longer than a conversion takes.
        """
        with self.lock:
            while self.waiting and not self.stopped:
                freer = any(self.idle[other] and self.load[other] < self.load[device] for other in self.devices)
                run = self.waiting[0]
                if not freer and (not _converts(run) or self._folder(run.convert) in self.converted):
                    self.waiting.remove(run)
                    self.idle[device] -= 1
                    self.load[device] += self.study.tokens(run)
                    self.lock.notify_all()
                    return run
                self.lock.wait()
        return None

    def _run(self, run: Run, device: str | None) -> dict[str, Any]:
        """Train and measure; returns the row."""
        student = self._folder(run.convert) if _converts(run) else Path(self.study.teacher)
        if error := self.converted.get(student):
            raise Failed(error)
        folder, log, model = self.output / run.name, self.logs / f"{run.name}.log", student
        threads = max(1, available_cpus() // len(self.devices))
        folder.mkdir(parents=True, exist_ok=True)
        if run.recipe is not None:
            overrides, _ = self.study.recipe(run, str(student))
            self._call("deltanet_recipes.cli", ["distill", run.recipe, *overrides], log, device, threads)
            model = folder / "final"
        figures = folder / "figures.json"
        arguments = [self.study.arrays, str(figures), "--teacher", self.study.teacher, "--model", f"{run.name}={model}"]
        self._call("measuring.study.mixer_row", arguments, log, device, threads)
        (row,) = json.loads(figures.read_text())
        figures.unlink()
        row["command"] = f"python -m measuring.study {self.file} --only {run.name}"
        return row  # type: ignore[no-any-return]

    def _call(self, module: str, arguments: list[str], log: Path, device: str | None, threads: int) -> None:
        """Run `python -m MODULE ...` and append its output to `log`. Raises Failed if its exit code is not 0."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(threads))
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        with open(log, "ab") as stream:
            begin = stream.tell()
            with self.lock:
                if self.stopped:
                    raise Failed("stopped")
                command = [sys.executable, "-m", module, *arguments]
                process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
                self.processes.add(process)
            code = process.wait()
            with self.lock:
                self.processes.remove(process)
        if code:
            what = arguments[0] if module == "deltanet_recipes.cli" else "measure"
            raise Failed(f"{what} ended with exit code {code}: {_last_words(log, begin)}")

    def _finish(self, run: Run, row: dict[str, Any]) -> None:
        folder = self.output / run.name
        if not run.keep:
            for name in ("final", "stages", "checkpoints"):
                shutil.rmtree(folder / name, ignore_errors=True)
        journal = self._journal(run)
        journal.begin(_settings(run))
        journal.done(ROW, row)

    def _finished(self, run: Run) -> bool:
        """Whether an earlier call finished the run; if so, its row is added to the results, which may be a new file."""
        journal = self._journal(run)
        if not journal.resume(_settings(run)) or ROW not in journal.steps:
            return False
        self.results.add(journal.steps[ROW])
        return True

    def _journal(self, run: Run) -> Journal:
        """Where a finished run has its row."""
        return Journal(self.output / run.name / JOURNAL, "a run", "delete the folder or rename the run")

    def _in_order(self, rows: list[Row]) -> list[Row]:
        """Rows of other studies, then those of this one in its order."""
        return sorted(rows, key=lambda row: self.order.index(row["run"]) if row["run"] in self.order else -1)

    def _folder(self, conversion: Conversion) -> Path:
        options = json.dumps([self.study.teacher, conversion.arguments()])
        return self.output / "conversions" / hashlib.sha256(options.encode()).hexdigest()[:12]


def _converts(run: Run) -> bool:
    """Whether a run works on a converted model; otherwise it measures the teacher."""
    return run.untrained != "teacher"


def _settings(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", by_alias=True, exclude={"keep"})


def _last_words(log: Path, begin: int) -> str:
    """The last line of `log` after byte `begin` that reports an error, or else the last line."""
    with open(log, "rb") as stream:
        stream.seek(begin)
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "failed:"))]
    return (said or lines or [f"see {log.name}"])[-1][:500]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as values of CUDA_VISIBLE_DEVICES."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return allowed.split(",") if allowed else [str(index) for index in range(torch.cuda.device_count())]


def main(
    study: Annotated[Path, typer.Argument(help="YAML file of the study; docs/training.md explains every key.")],
    variables: Annotated[list[str] | None, typer.Argument(help="NAME=VALUE for variables of the file.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs to use. Default: all.")] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Number of runs that share a GPU at a time.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Carry out only the runs with this name, in which * matches any text; repeatable."),
    ] = None,
) -> None:
    """Convert, distil and measure every run of a study, and write one row per run to its results file."""
    settings = load_study(study, variables or ())
    runs = [run for run in settings.runs if any(fnmatch.fnmatch(run.name, pattern) for pattern in only or ["*"])]
    if not runs:
        raise UserError(f"--only: no run of {study} has such a name: {', '.join(run.name for run in settings.runs)}")
    found = visible_gpus()
    if gpus is not None and gpus > len(found):
        raise UserError(f"--gpus {gpus}: there are {len(found)}")
    devices: list[str | None] = [*found[:gpus]] or [None]
    failures = StudyRun(settings, runs, devices * per_gpu, study.name).work()
    if failures:
        typer.echo(f"{failures} of {len(runs)} runs failed; their logs are in {settings.output}/logs", err=True)
        raise typer.Exit(1)
