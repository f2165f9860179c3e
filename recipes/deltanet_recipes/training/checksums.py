"""Files that say what they should hold by SHA-256: a copy, or a disk, may change what was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deltanet_hf.errors import one_line
from deltanet_hf.safe_write import remove, sync_file, sync_folder, write_atomically, writing

SUMS = "SHA256SUMS"
BLOCK = 1 << 24  # bytes that are read at once


class Damaged(Exception):
    """A file does not hold what was written to it. The message is the rest of a line that begins with its name."""


def file_sum(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_sums(folder: Path, names: tuple[str, ...]) -> None:
    """Write the sums of the files into `folder`, where `sha256sum -c SHA256SUMS` compares them."""
    write_atomically(folder / SUMS, "".join(f"{file_sum(folder / name)}  {name}\n" for name in names).encode())


def check_sums(folder: Path, names: tuple[str, ...]) -> None:
    """Raises Damaged if one of the files is missing or is not the one whose sum is in `folder`."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        for name in names:
            if file_sum(folder / name) != sums.get(name):
                raise Damaged(f"{name} is damaged (its SHA-256 is not the one in {SUMS})")
    except OSError as error:
        raise Damaged(f"{Path(str(error.filename)).name} cannot be read ({error.strerror})") from None


def save_tensors(path: Path, tensors: dict[str, Tensor], note: Any = None) -> None:
    """Write a safetensors file, completely or not at all, with a JSON value and the sum of both."""
    text = json.dumps(note)
    metadata = {"note": text, "sha256": _sum(tensors, text)}
    scratch = path.with_name(path.name + ".partial")  # safetensors makes a temporary file of its own beside its result
    with writing(path):
        remove(scratch)
        scratch.mkdir(parents=True)
        try:
            file = scratch / path.name
            save_file(tensors, file, metadata=metadata)
            sync_file(file)
            os.replace(file, path)
            sync_folder(path.parent)
        finally:
            remove(scratch)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors and metadata that `save_tensors` wrote; raises Damaged if the file has changed since."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except (SafetensorError, OSError) as error:
        raise Damaged(f"cannot be read ({one_line(error, 200)})") from None
    if metadata.get("sha256") != _sum(tensors, metadata.get("note", "")):
        raise Damaged("is damaged (the SHA-256 of its tensors is not the one in its header)")
    return tensors, json.loads(metadata["note"])


def is_intact(path: Path, say: Callable[[str], None], remedy: str) -> bool:
    """Whether `path` is a file of `save_tensors` that has not changed since; `say` gets a line about a damaged one."""
    if not path.is_file():
        return False
    try:
        load_tensors(path)
    except Damaged as problem:
        say(f"{path}: {problem}; {remedy}")
        return False
    return True


def _sum(tensors: dict[str, Tensor], note: str) -> str:
    digest = hashlib.sha256(note.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
