"""Many runs by one command: `python -m deltanet_recipes.study STUDY.yaml NAME=VALUE ... --gpus N`.

Each run is converted (once per distinct conversion), distilled and measured by processes of its own, on one GPU; its
row is in the results file before the next run begins there. Called again, it skips finished runs and continues the
others; a run that fails becomes a row with its error, is tried again by the next call, and stops nothing else.

OUTPUT/NAME: the run. OUTPUT/conversions: converted models. OUTPUT/logs/NAME.log: what its processes said.
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
from deltanet_recipes.study.results_row import append_rows
from deltanet_recipes.study.study_config import Conversion, Run, Study, load_study

ROW = "row.json"  # in a run's folder: it is finished
CORES_PER_CONVERSION = 6  # its products are small: with 64 threads it took several times longer


class Failed(Exception):
    """A process of a run ended with an error; the message is its last words."""


class StudyRun:
    """Works off the runs of a study.

    Args:
        runs: of the study, those to be done.
        devices: GPU of each worker, as CUDA_VISIBLE_DEVICES wants it; one None for the CPU.
    """

    def __init__(self, study: Study, runs: list[Run], devices: list[str | None]) -> None:
        self.study, self.devices = study, devices
        self.output, self.results = Path(study.output), Path(study.results)
        self.logs = self.output / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.results.parent.mkdir(parents=True, exist_ok=True)
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
        """Do everything; returns the number of runs that failed."""
        cores = os.cpu_count() or 1
        converters = max(1, min(len(self.conversions), cores // CORES_PER_CONVERSION))
        threads = [threading.Thread(target=self._convert_all) for _ in range(converters)]
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

    def _convert_all(self) -> None:
        threads = min(os.cpu_count() or 1, CORES_PER_CONVERSION)
        while True:
            with self.lock:
                if not self.conversions or self.stopped:
                    return
                folder = self.conversions.pop(0)
            error = None
            if not (folder / "conversion.json").is_file():
                arguments = ["convert", self.study.teacher, str(folder), *self.options[folder].arguments(), "--resume"]
                try:
                    self._call("deltanet_recipes.cli", arguments, self.logs / f"{folder.name}.log", None, threads)
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
            except Exception as failure:  # whatever it is, the other runs go on
                if self.stopped:
                    return
                row = {"run": run.name, "error": str(failure) or repr(failure)}
                with self.lock:
                    self.failures += 1
            row |= {"wall_seconds": round(time.perf_counter() - began, 1), "runs_at_once": self.devices.count(device)}
            with self.lock:
                append_rows(self.results, [row], self.order)
                self.idle[device] += 1
                self.load[device] -= self.study.tokens(run)
                self.lock.notify_all()
            if "error" not in row:
                self._finish(run, row)
            typer.echo(f"{run.name}: {row.get('error') or _figures(row)} ({row['wall_seconds']:.0f} s)")

    def next_run(self, device: str | None) -> Run | None:
        """The longest run whose conversion is done, once there is one; None when all are taken.

        A worker leaves it to one whose device has less to do.
        """
        with self.lock:
            while self.waiting and not self.stopped:
                freer = any(self.idle[other] and self.load[other] < self.load[device] for other in self.devices)
                for run in () if freer else self.waiting:
                    if not _converts(run) or self._folder(run.convert) in self.converted:
                        self.waiting.remove(run)
                        self.idle[device] -= 1
                        self.load[device] += self.study.tokens(run)
                        self.lock.notify_all()
                        return run
                self.lock.wait()
        return None

    def _run(self, run: Run, device: str | None) -> dict[str, Any]:
        """Train and measure; the row."""
        student = self._folder(run.convert) if _converts(run) else Path(self.study.teacher)
        if error := self.converted.get(student):
            raise Failed(error)
        folder, log, model = self.output / run.name, self.logs / f"{run.name}.log", student
        threads = max(1, (os.cpu_count() or 1) // len(self.devices))
        folder.mkdir(parents=True, exist_ok=True)
        if run.recipe is not None:
            overrides, _ = self.study.recipe(run, str(student))
            self._call("deltanet_recipes.cli", ["distill", run.recipe, *overrides], log, device, threads)
            model = folder / "final"
        figures = folder / "figures.json"
        arguments = [self.study.arrays, str(figures), "--teacher", self.study.teacher, "--model", f"{run.name}={model}"]
        arguments += ["--window"] if run.untrained == "window" else []
        self._call("deltanet_recipes.study.results_row", arguments, log, device, threads)
        (row,) = json.loads(figures.read_text())
        figures.unlink()
        return row  # type: ignore[no-any-return]

    def _call(self, module: str, arguments: list[str], log: Path, device: str | None, threads: int) -> None:
        """Run `python -m MODULE ...`, its words appended to `log`. Raises Failed unless it ends well."""
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
        (folder / ROW).write_text(json.dumps({"settings": _settings(run), "row": row}, indent=1))

    def _finished(self, run: Run) -> bool:
        """Whether the run was done by an earlier call; its row is added to the results again, should they be new."""
        path = self.output / run.name / ROW
        if not path.is_file():
            return False
        found = json.loads(path.read_text())
        if found["settings"] != _settings(run):
            raise UserError(f"{path.parent}: holds a run of this name with other settings; delete it or rename the run")
        append_rows(self.results, [found["row"]], self.order)
        return True

    def _folder(self, conversion: Conversion) -> Path:
        asked = json.dumps([self.study.teacher, conversion.arguments()])
        return self.output / "conversions" / hashlib.sha256(asked.encode()).hexdigest()[:12]


def _converts(run: Run) -> bool:
    """Whether a run begins with a conversion, not with the teacher itself."""
    return run.untrained not in ("teacher", "window")


def _settings(run: Run) -> dict[str, Any]:
    return run.model_dump(mode="json", by_alias=True, exclude={"keep"})


def _last_words(log: Path, begin: int) -> str:
    """The last line that says what went wrong, else the last line."""
    with open(log, "rb") as stream:
        stream.seek(begin)
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("error:", "failed:"))]
    return (said or lines or [f"see {log.name}"])[-1][:500]


def _figures(row: dict[str, Any]) -> str:
    return "  ".join(f"{key} {figure['value']:.4g}" for key, figure in row["metrics"].items())


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, for CUDA_VISIBLE_DEVICES."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return allowed.split(",") if allowed else [str(index) for index in range(torch.cuda.device_count())]


def main(
    study: Annotated[Path, typer.Argument(help="YAML file; docs/training.md explains every key.")],
    variables: Annotated[list[str] | None, typer.Argument(help="NAME=VALUE of the file's variables.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Use this many GPUs; default: all.")] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Runs at once on one GPU.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Only runs of this name (* matches all); repeatable.")] = None,
) -> None:
    """Convert, distil and measure every run of a study."""
    settings = load_study(study, variables or ())
    runs = [run for run in settings.runs if any(fnmatch.fnmatch(run.name, pattern) for pattern in only or ["*"])]
    if not runs:
        raise UserError(f"--only: no run of {study} has such a name: {', '.join(run.name for run in settings.runs)}")
    found = visible_gpus()
    if gpus is not None and gpus > len(found):
        raise UserError(f"--gpus {gpus}: there are {len(found)}")
    devices: list[str | None] = [*found[:gpus]] or [None]
    failures = StudyRun(settings, runs, devices * per_gpu).work()
    if failures:
        typer.echo(f"{failures} of {len(runs)} runs failed; their logs are in {settings.output}/logs", err=True)
        raise typer.Exit(1)
