"""Runs a conversion, an export and a training run on a real disk that is full again and again; prints JSON.

    unshare -Urm python -m support.full_disk FOLDER

FOLDER becomes a small file system in memory, which is enlarged by a step whenever the work ends for want of space. The
same work is then repeated, and so continues. Every end must be one line, and the result that of an ample disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging

from deltanet_convert import conversion as convert_module
from deltanet_convert import output_files
from deltanet_convert.export.stream_export import write_export
from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from deltanet_recipes.config import load_recipe
from deltanet_recipes.training.pipeline import run
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion
from support.tiny_export import EVERY_OTHER, exportable_model, planned, saved
from support.tiny_run import ALIGN, DISTIL, make_workplace, recipe_tree, write_recipe

STEP = 16  # KiB by which the disk grows
MOST = 4000


class Disk:
    """A file system in memory at `folder`, of `size` KiB."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 0

    def grow(self) -> None:
        how = "remount," if self.size else ""
        self.size += STEP
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"{how}size={self.size}k", "none", str(self.folder)], check=True)

    def remove(self) -> None:
        # lazily, because corpora stay mapped
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
        self.size = 0


def conversion(place: Path) -> Callable[[Path], object]:
    START["gated_deltanet"] = quick_start
    convert_module.check_disk = lambda *args: None  # or it would say before it begins that the disk is too small
    output_files.layer_error_plot = lambda layers, path: path.write_bytes(json.dumps(layers).encode())
    teacher = teacher_folder(place / "teacher", "llama", num_hidden_layers=2)
    text = place / "text.txt"
    text.write_text("Some words to measure with. " * 200)
    return lambda out: tiny_conversion(teacher, out, resume=True, text=text)


def export(place: Path) -> Callable[[Path], object]:
    source = saved(exportable_model("qwen3", EVERY_OTHER), place / "model")

    def write(out: Path) -> None:
        plan = planned(source, shard_size=30_000)
        write_export(plan, out, "transformers", resume=True, overwrite=False, progress=lambda done, total: None)

    return write


def training(place: Path) -> Callable[[Path], object]:
    make_workplace(place)
    stages = [{**ALIGN, "mode": "layerwise", "tokens": 128 * 3, "cached_tokens": 256}, {**DISTIL, "tokens": 128 * 7}]

    def train(out: Path) -> None:
        recipe = write_recipe(place, recipe_tree(place, stages, output=str(out)))
        run(load_recipe(recipe), console=Console(file=io.StringIO()))

    return train


WORKS: dict[str, Callable[[Path], Callable[[Path], object]]] = {
    "convert": conversion,
    "export": export,
    "distill": training,
}


def digest(out: Path) -> dict[str, str]:
    files = sorted((out / "final" if (out / "final").exists() else out).glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def fill(work: Callable[[Path], object], disk: Disk) -> dict[str, Any]:
    """Do the work on the disk until it succeeds: how often it ended before, and the messages without their paths."""
    out, ends = disk.folder / "out", 0
    messages: set[str] = set()
    began = time.perf_counter()
    disk.grow()
    while disk.size < MOST:
        try:
            work(out)
        except UserError as error:
            ends += 1
            message = str(error)
            assert "\n" not in message, message
            messages.add(" ".join(word for word in message.split() if "/" not in word))
            disk.grow()
        else:
            break
    seconds = round(time.perf_counter() - began, 1)
    return {"ends": ends, "KiB": disk.size, "seconds": seconds, "messages": sorted(messages), "files": digest(out)}


def main(folder: Path) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    disk, found = Disk(folder), {}
    for name, prepare in WORKS.items():
        with tempfile.TemporaryDirectory() as place:
            work = prepare(Path(place))
            work(Path(place) / "ample")
            wanted = digest(Path(place) / "ample")
            result = fill(work, disk)
            result["as on an ample disk"] = result.pop("files") == wanted and bool(wanted)
            left = [path.name for path in disk.folder.iterdir() if path.name.startswith(".")]
            found[name] = {**result, "left behind": left}
            disk.remove()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
