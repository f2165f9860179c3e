"""Finds a teacher given as a local folder, a GGUF file or a hub id; the result is always a local folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from deltanet_hf.errors import UserError
from deltanet_hf.hub import model_folder
from deltanet_hf.inside import check_links
from deltanet_hf.safe_write import write_atomically, writing

from .safetensors_folder import PICKLES


@dataclass(frozen=True)
class Source:
    """The folder of a teacher."""

    name: str  # the folder's or file's name, or the hub id
    folder: Path
    revision: str | None  # commit on the hub
    gguf: Path | None = None  # the file of which `folder` is a dequantised copy, which is removed at the end


def resolve_source(teacher: str, scratch: Path, dtype: torch.dtype | None, revision: str | None = None) -> Source:
    """Finds the teacher. A GGUF file is dequantised, tensor by tensor, into a copy on the disk; a hub id is downloaded.

    Args:
        teacher: a folder, a .gguf file, a folder with one .gguf file, or a hub id.
        scratch: folder for the dequantised copy, which is reused if it was made from the same file.
        dtype: dtype of the dequantised copy; None for bfloat16.
        revision: branch, tag or commit on the hub; None for the main branch.

    Raises:
        UserError: there is no such teacher, its weights are pickled or cannot be read, or it links to files elsewhere.
    """
    path = model_folder(teacher, revision)
    if path.is_file():
        if path.suffix == ".gguf":
            return Source(path.name, _dequantised(path, scratch, dtype), None, path)
        if path.suffix in PICKLES:
            raise UserError(f"{path}: pickled weights can run code when loaded and are refused; give safetensors")
        raise UserError(f"{path}: give the folder that holds config.json and the weights, or a .gguf file")
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            if len(ggufs) > 1:
                raise UserError(f"{path}: holds {len(ggufs)} .gguf files; give one of them, such as {ggufs[0]}")
            return Source(ggufs[0].name, _dequantised(ggufs[0], scratch, dtype), None, ggufs[0])
    check_links(path)
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"{path}: holds an adapter (adapter_config.json), which names another folder as its model; merge the two "
            "(merge_and_unload of peft) and save the result"
        )
    if path == Path(teacher).expanduser():
        return Source(path.resolve().name, path, None)
    return Source(teacher, path, path.name)


def _dequantised(file: Path, scratch: Path, dtype: torch.dtype | None) -> Path:
    """Writes the dequantised copy of a GGUF file to `scratch`, unless it is there already; returns `scratch`.

    Raises:
        UserError: the file cannot be read.
        ModuleNotFoundError: the package `gguf` is missing.
    """
    from .gguf_teacher import GgufTeacher

    state = file.stat()
    made_from = f"{file.resolve()} {state.st_size} {state.st_mtime_ns} {dtype}"
    done = scratch / "made_from"
    if done.exists() and done.read_text() == made_from:
        return scratch
    teacher = GgufTeacher.open(file, dtype or torch.bfloat16)
    with writing(scratch):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        teacher.write(scratch)
    write_atomically(done, made_from.encode())
    return scratch
