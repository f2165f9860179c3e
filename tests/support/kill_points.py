"""Kills conversions, exports, selections and training runs with SIGKILL at many points and resumes them; prints JSON.

    echo "convert|export|gguf|select|train fresh|overwrite|twice POINTS FOLDER" | python -m support.kill_points

A child process is killed before or after its n-th call that changes the disk, for POINTS values of n spread over the
complete work and for each of its last calls (publication). Each line of the input is answered by one of JSON. This runs
as a separate process because it forks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deltanet_convert import output_files
from deltanet_convert.export import gguf
from deltanet_convert.export.stream_export import write_export
from deltanet_convert.select import objectives, probes
from deltanet_convert.select import run as run_module
from deltanet_convert.select.probe_text import FORMATS
from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from support.far_model import far_folder
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion
from support.tiny_export import exportable_model, planned, saved
from support.tiny_selection import tiny_selection

CHANGES = ("fsync", "replace", "pwrite", "truncate", "unlink", "rmdir", "mkdir", "posix_fallocate")
LAST = 10  # number of last calls that are all tried: publication and cleanup


def digest(out: Path) -> dict[str, str]:
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@dataclass(frozen=True)
class Work:
    """The work that is killed: `run(resume=..., overwrite=...)` writes `out`; `run_other` writes a different output."""

    out: Path
    run: Callable[..., None]
    run_other: Callable[[], None]
    digest: Callable[[Path], dict[str, Any]] = digest


def conversion(folder: Path) -> Work:
    START["gated_deltanet"] = quick_start
    output_files.layer_error_plot = lambda layers, path: path.write_bytes(json.dumps(layers).encode())
    teacher = teacher_folder(folder / "teacher", "qwen2", num_hidden_layers=2)
    out = folder / "out"
    run = partial(tiny_conversion, teacher, out, seed=1, shard_size=40_000)
    return Work(out, run, partial(tiny_conversion, teacher, out, seed=2))


def export(folder: Path) -> Work:
    source = saved(exportable_model("qwen3", (0,), num_hidden_layers=2), folder / "model")
    out = folder / "out"
    write = partial(write_export, out=out, style="transformers", progress=lambda done, total: None)

    def run(resume: bool = False, overwrite: bool = False) -> None:
        write(planned(source, shard_size=30_000), resume=resume, overwrite=overwrite)

    return Work(out, run, lambda: write(planned(source), resume=False, overwrite=False))


def gguf_export(folder: Path) -> Work:
    """Uses a converter that writes digests of the exported folder, so that the GGUF file depends on every file."""
    source = saved(exportable_model("qwen3", (0,), num_hidden_layers=2), folder / "model")
    tools, out = folder / "tools", folder / "out.gguf"
    tools.mkdir()
    (tools / gguf.SCRIPT).write_text(
        "import hashlib, pathlib, sys\n"
        "files = sorted(pathlib.Path(sys.argv[1]).iterdir())\n"
        "lines = [f.name + hashlib.sha256(f.read_bytes()).hexdigest() for f in files] + sys.argv[5:6]\n"
        "pathlib.Path(sys.argv[3]).write_text('\\n'.join(lines))\n"
    )
    os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
    write = partial(gguf.write_gguf, out=out, progress=lambda done, total: None)

    def run(resume: bool = False, overwrite: bool = False) -> None:
        write(planned(source, shard_size=30_000), outtype="float16", resume=resume, overwrite=overwrite)

    return Work(out, run, lambda: write(planned(source), outtype="q8_0", resume=False, overwrite=False))


def selection(folder: Path) -> Work:
    probes.CHARACTERS = 2000
    run_module.selection_plot = lambda selection: json.dumps(selection.to_json()).encode()
    objectives.selection_probes = partial(probes.selection_probes, formats=FORMATS[:1])
    teacher = far_folder(folder / "teacher")
    out = folder / "selection.json"

    def run(seed: int = 1, resume: bool = False, overwrite: bool = False) -> None:  # `select` always resumes
        tiny_selection(teacher, out, "2", seed=seed, overwrite=overwrite)

    return Work(out, run, partial(run, 2))


def training(folder: Path) -> Work:
    from deltanet_recipes.config import load_recipe
    from deltanet_recipes.training import pipeline
    from support.fault_runs import STAGES
    from support.tiny_run import losses, make_workplace, recipe_tree, write_recipe

    pipeline.draw_plots = lambda *args: []
    make_workplace(folder)
    out = folder / "run"

    def run(seed: int = 1, resume: bool = False) -> None:  # `distill` always resumes
        recipe = write_recipe(folder, recipe_tree(folder, STAGES, output=str(out), seed=seed))
        pipeline.run(load_recipe(recipe), console=Console(file=io.StringIO()))

    def trained(out: Path) -> dict[str, Any]:
        """Losses, final weights, and what is left behind: tokens are cached under a name of the process, with a dot."""
        weights = list(out.glob("final/model.safetensors"))
        left = [path.name for path in out.rglob("*") if path.suffix in (".partial", ".tmp", ".damaged")]
        left = [name for name in left if name.count(".") < 2]
        return {"losses": sorted(losses(out)), "left": left, **{path.name: digest(path) for path in weights}}

    return Work(out, run, partial(run, 2), trained)


WORKS = {"convert": conversion, "export": export, "gguf": gguf_export, "select": selection, "train": training}


def remove(out: Path) -> None:
    if out.is_dir():
        shutil.rmtree(out)
    else:
        out.unlink(missing_ok=True)
        out.with_suffix(".png").unlink(missing_ok=True)  # the plot of a selection


def copy(source: Path, out: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, out)
    else:
        shutil.copyfile(source, out)


def instrument(at_call: Callable[[int], bool], *, after: bool) -> list[int]:
    """Wraps the calls that change the disk; call n kills the process if `at_call(n)`. Returns the counter of calls."""
    counter = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counter[0] += 1
            dies = at_call(counter[0])
            if dies and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return function(*args, **kwargs)
            finally:  # also behind a call that fails, such as the removal of a file that is not there
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapped

    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))
    accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10: what `Path.unlink` and others call
    for name in CHANGES:
        if hasattr(accessor, name):
            setattr(accessor, name, getattr(os, name))
    return counter


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process and returns its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except UserError as error:
            print(error, file=sys.stderr)
            os._exit(2)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(what: str, mode: str, folder: Path, points: int) -> None:
    work = WORKS[what](folder)
    out, run, digest = work.out, work.run, work.digest
    work.run_other()  # imports everything, before any fork
    old = digest(out)
    shutil.move(out, folder / "old")
    remove(out)
    if mode == "overwrite":
        copy(folder / "old", out)
    again: dict[str, Any] = {"overwrite": True} if mode == "overwrite" else {}

    def counted() -> None:
        counter = instrument(lambda n: False, after=False)
        run(**again)
        (folder / "calls").write_text(str(counter[0]))

    assert in_child(counted) == 0
    total, wanted = int((folder / "calls").read_text()), digest(out)
    remove(out)
    spread = {1 + i * (total - 1) // (points - 1) for i in range(points)}
    chosen = sorted(spread if mode == "twice" else spread | set(range(total - LAST, total + 1)))
    found = []
    for n in chosen:
        remove(out)
        if mode == "overwrite":
            copy(folder / "old", out)

        def killed(n: int = n, **options: Any) -> None:
            instrument(lambda call: call == n, after=n % 2 == 0)
            run(**again, **options)

        result: dict[str, Any] = {"point": n, "killed": os.WIFSIGNALED(in_child(killed))}
        if mode == "twice":
            result["killed again"] = os.WIFSIGNALED(in_child(partial(killed, max(1, n // 2), resume=True)))
        states = {None: "absent", json.dumps(wanted): "complete"}
        if mode == "overwrite":
            states[json.dumps(old)] = "old"
        seen = json.dumps(digest(out)) if out.exists() else None
        result["visible"] = states.get(seen, "broken")
        result["resumed"] = os.waitstatus_to_exitcode(in_child(lambda: run(**again, resume=True)))
        result["identical"] = out.exists() and digest(out) == wanted
        result["left behind"] = sorted(file.name for file in folder.iterdir() if file.name.startswith("."))
        found.append(result)
    print(json.dumps({"calls": total, "points": found}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        what, mode, points, folder = line.rstrip("\n").split(" ", 3)
        if in_child(partial(main, what, mode, Path(folder), int(points))):
            sys.exit(f"{line}: failed")
