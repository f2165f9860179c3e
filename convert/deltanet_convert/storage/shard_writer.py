"""Writes safetensors shards tensor by tensor, in any order, without holding tensors in memory.

The layout is fixed first: every tensor has its place in its shard before the first one is computed. A tensor that is
written twice, after a crash, fills the same bytes. A resumed conversion is therefore identical to an uninterrupted one.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltanet_hf.safe_write import reserve, sync_file, sync_folder, write_atomically, writing

from .safetensors_folder import INDEX_FILE, SINGLE_FILE
from .safetensors_header import FLOAT_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()} | {torch.int64: "I64"}


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor of the output."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file: its complete header, and the offset of each tensor from the beginning of the file, in bytes."""

    file_name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


@dataclass(frozen=True)
class Layout:
    """All tensors of the output and their places."""

    specs: Mapping[str, TensorSpec]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    def index(self) -> bytes | None:
        """The contents of the index file; None if there is only one shard."""
        if len(self.shards) == 1:
            return None
        weight_map = {name: shard.file_name for shard in self.shards for name in shard.offsets}
        metadata = {
            "total_parameters": sum(spec.numel for spec in self.specs.values()),
            "total_size": sum(spec.nbytes for spec in self.specs.values()),
        }
        value = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(value, indent=2) + "\n").encode()


def plan_layout(specs: Sequence[TensorSpec], shard_size: int) -> Layout:
    """Packs the tensors, in order, into shards of at most `shard_size` bytes; a larger tensor has its own shard."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.nbytes > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    count = len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_FILE]
    shards = tuple(_shard(name, group) for name, group in zip(names, groups, strict=True))
    return Layout({spec.name: spec for spec in specs}, shards)


def _shard(file_name: str, specs: Sequence[TensorSpec]) -> Shard:
    # Wider dtypes come first, so that every tensor begins at a multiple of its item size.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for spec in ordered:
        begins[spec.name] = position
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    header = len(body).to_bytes(8, "little") + body
    return Shard(
        file_name,
        header,
        {name: len(header) + begin for name, begin in begins.items()},
        len(header) + position,
    )


class ShardWriter:
    """Fills the shards of a layout in `folder`; they have temporary names until `finish`."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self._shard_of = {name: shard for shard in layout.shards for name in shard.offsets}
        self._touched: dict[str, Shard] = {}

    def _temporary(self, shard: Shard) -> Path:
        return self.folder / (shard.file_name + ".tmp")

    def prepare(self) -> None:
        """Reserves the disk space of every shard and writes the headers; safe to repeat."""
        for shard in self.layout.shards:
            if (self.folder / shard.file_name).exists():
                continue
            path = self._temporary(shard)
            reserve(path, shard.size)
            with writing(path):
                with path.open("r+b") as file:
                    file.write(shard.header)
                sync_file(path)
        with writing(self.folder):
            sync_folder(self.folder)

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Writes one tensor, given as consecutive pieces of its elements, in the layout's dtype.

        Raises:
            ValueError: the pieces together do not have the tensor's number of elements.
        """
        spec, shard = self.layout.specs[name], self._shard_of[name]
        path, offset, count = self._temporary(shard), shard.offsets[name], 0
        self._touched[shard.file_name] = shard
        with writing(path):
            descriptor = os.open(path, os.O_WRONLY)
            try:
                for piece in pieces:
                    count += piece.numel()
                    if count > spec.numel:
                        raise ValueError(f"{name}: more than the {spec.numel} elements of its layout")
                    flat = piece.detach().to(spec.dtype).contiguous().reshape(-1)
                    offset += _write_at(descriptor, memoryview(flat.view(torch.uint8).numpy().data), offset)
            finally:
                os.close(descriptor)
        if count != spec.numel:
            raise ValueError(f"{name}: {count} elements written, the layout has {spec.numel}")

    def sync(self) -> None:
        """Flushes everything written so far to the disk."""
        for shard in self._touched.values():
            path = self._temporary(shard)
            with writing(path):
                sync_file(path)
        self._touched.clear()

    def finish(self) -> None:
        """Renames the shards to their final names, then writes the index; safe to repeat."""
        self.sync()
        for shard in self.layout.shards:
            final = self.folder / shard.file_name
            if not final.exists():
                with writing(final):
                    os.replace(self._temporary(shard), final)
        with writing(self.folder):
            sync_folder(self.folder)
        index = self.layout.index()
        if index is not None:
            write_atomically(self.folder / INDEX_FILE, index)


def _write_at(descriptor: int, data: memoryview, offset: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)
    return written
