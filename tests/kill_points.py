"""Kills conversions with SIGKILL at many points and resumes them; prints what was found as JSON.

    python kill_points.py fresh|overwrite|twice FOLDER POINTS

A child process dies before or after its n-th call that changes the disk, for POINTS values of n spread over the whole
conversion and every one of its last calls (publishing). Run as a script: it forks, which needs a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltanet_convert import layer_step, output
from deltanet_hf.errors import UserError
from tiny_conversion import quick_start, teacher_folder, tiny_conversion

CHANGES = ("fsync", "replace", "pwrite", "truncate", "unlink", "rmdir", "mkdir", "posix_fallocate")
LAST = 10  # calls that are all tried: the publishing and the tidying up


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def instrument(at_call: Callable[[int], bool], *, after: bool) -> list[int]:
    """Wraps the calls that change the disk; dies where `at_call(n)` says so. Returns the counter."""
    counter = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counter[0] += 1
            dies = at_call(counter[0])
            if dies and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))
    return counter


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; its wait status."""
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


def main(mode: str, folder: Path, points: int) -> None:
    torch.set_num_threads(1)
    layer_step.initialise_layer = quick_start
    output.layer_error_plot = lambda layers, path: path.write_bytes(json.dumps(layers).encode())
    teacher = teacher_folder(folder / "teacher", "qwen2", num_hidden_layers=2)
    out, seeds = folder / "out", {"seed": 1, "shard_size": 40_000}

    def run(**options: Any) -> None:
        tiny_conversion(teacher, out, **seeds, **options)

    tiny_conversion(teacher, out, seed=2)  # imports everything, before any fork
    old = digest(out)
    shutil.move(out, folder / "old")
    if mode == "overwrite":
        shutil.copytree(folder / "old", out)
    again: dict[str, Any] = {"overwrite": True} if mode == "overwrite" else {}

    def counted() -> None:
        counter = instrument(lambda n: False, after=False)
        run(**again)
        (folder / "calls").write_text(str(counter[0]))

    assert in_child(counted) == 0
    total, wanted = int((folder / "calls").read_text()), digest(out)
    shutil.rmtree(out)
    spread = {1 + i * (total - 1) // (points - 1) for i in range(points)}
    chosen = sorted(spread if mode == "twice" else spread | set(range(total - LAST, total + 1)))
    found = []
    for n in chosen:
        shutil.rmtree(out, ignore_errors=True)
        if mode == "overwrite":
            shutil.copytree(folder / "old", out)

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
    print(json.dumps({"calls": total, "points": found}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
