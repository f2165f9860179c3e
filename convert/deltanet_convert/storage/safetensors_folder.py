"""A model's weights on disk: every header is checked first; tensors are read one by one, when they are used."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.hub import INDEX_FILE, SINGLE_FILE
from deltanet_hf.inside import inside
from deltanet_hf.journal import file_state

from .safetensors_header import DOWNLOAD_AGAIN, FLOAT_DTYPES, TensorEntry, read_header

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
BLOCK_ELEMENTS = 1 << 22  # elements per block, which limits temporary copies to 16 MiB


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; UserError if the file is missing, unreadable or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file; give a complete checkpoint folder") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check its permissions") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({error}); {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds a {type(value).__name__} where a JSON object belongs; {DOWNLOAD_AGAIN}")
    return value


@dataclass(frozen=True)
class JoinedEntry:
    """A tensor [n, ...] stored in parts, the same number of them for each index of the first dimension."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype


StoredTensor: TypeAlias = TensorEntry | JoinedEntry


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder of safetensors files; only `read`, `read_index` and `blocks` load them."""

    folder: Path
    entries: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Checks the index and every header; UserError if any of them is damaged, inconsistent or unsafe."""
        index, single = folder / INDEX_FILE, folder / SINGLE_FILE
        if not index.exists() and not single.exists():
            raise UserError(_nothing_to_read(folder))
        if index.exists():
            return cls(folder, _sharded(folder, index))
        file = inside(folder, SINGLE_FILE, single)
        return cls(folder, read_header(file))

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def files(self) -> list[Path]:
        return sorted({part.file for entry in self.entries.values() for part in entry.parts})

    def file_states(self) -> dict[str, list[int]]:
        """The state of each file; a resumed run requires the same."""
        return {file.name: file_state(file) for file in self.files()}

    def dtype(self, name: str) -> torch.dtype:
        return FLOAT_DTYPES[self.entries[name].dtype]

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Reads a complete tensor into new memory, in `dtype` (default: as stored).

        Raises:
            UserError: the tensor holds a NaN or an infinite value, or overflows in `dtype`.
        """
        entry = self.entries[name]
        return _filled(torch.empty(entry.shape, dtype=dtype or self.dtype(name)), entry, self.blocks(name))

    def read_index(self, name: str, index: int, dtype: torch.dtype) -> Tensor:
        """Reads the part of a tensor [n, ...] with this index of the first dimension, as `read` does."""
        entry = self.entries[name]
        if isinstance(entry, JoinedEntry):
            count = len(entry.parts) // entry.shape[0]
            blocks: Iterator[Tensor] = itertools.chain(*map(_blocks, entry.parts[index * count : (index + 1) * count]))
        else:
            blocks = _blocks(entry, index)
        return _filled(torch.empty(entry.shape[1:], dtype=dtype), entry, blocks)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yields the tensor's elements in order, as flat pieces in the stored dtype.

        The complete tensor is never in memory.
        """
        for part in self.entries[name].parts:
            yield from _blocks(part)


def _blocks(entry: TensorEntry, index: int | None = None) -> Iterator[Tensor]:
    """The elements of a stored tensor, in flat pieces; of a tensor [n, ...], those with this index if one is given."""
    shape = entry.shape if index is None else entry.shape[1:]
    rows = shape[0] if shape else 1
    per_block = max(1, BLOCK_ELEMENTS * rows // max(1, math.prod(shape)))
    try:
        # Opened once per tensor, because the pages of a memory map count as resident until it is closed.
        with safe_open(entry.file, framework="pt") as shard:
            if not shape:
                pieces: Iterator[Tensor] = iter([shard.get_tensor(entry.name)])
            else:
                part, first = shard.get_slice(entry.name), range(0, rows, per_block)
                if index is None:
                    pieces = (part[row : row + per_block] for row in first)
                else:
                    pieces = (part[index : index + 1, row : row + per_block] for row in first)
            for piece in pieces:
                flat = piece.reshape(-1)
                _check_finite(entry, flat, "holds {}; the teacher is damaged: " + DOWNLOAD_AGAIN)
                yield flat
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{entry.file}: tensor '{entry.name}' cannot be read ({error}); the file changed or is damaged, "
            f"{DOWNLOAD_AGAIN}"
        ) from error


def _filled(out: Tensor, entry: StoredTensor, blocks: Iterator[Tensor]) -> Tensor:
    """Copies the blocks into `out` one behind the other."""
    filled = 0
    for block in blocks:
        flat = out.view(-1)[filled : filled + block.numel()]
        flat.copy_(block)
        _check_finite(entry, flat, "overflows in the conversion's dtype; choose --dtype float32 or bfloat16")
        filled += block.numel()
    return out


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: the least and the largest are NaN if any is.

    On a CPU this takes a twentieth of the time of `isfinite`.
    """
    return values.numel() == 0 or all(map(math.isfinite, torch.stack(values.aminmax()).tolist()))


def _check_finite(entry: StoredTensor, values: Tensor, problem: str) -> None:
    if all_finite(values):
        return
    kind = "NaN" if bool(torch.isnan(values).any()) else "an infinite value"
    raise UserError(f"{entry.file}: tensor '{entry.name}' {problem.format(kind)}")


def _sharded(folder: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: key 'weight_map' is missing or empty; {DOWNLOAD_AGAIN}")
    shards: dict[str, Path] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise UserError(
                f"{index}: weight_map['{tensor}'] is {shard!r}, not a .safetensors file; save the teacher "
                "with save_pretrained"
            )
        if shard not in shards:
            shards[shard] = inside(folder, shard, index)
    entries: dict[str, TensorEntry] = {}
    for shard, file in sorted(shards.items()):
        if not file.is_file():
            raise UserError(f"{index}: shard '{shard}' is not in {folder}; download the missing file")
        for name, entry in read_header(file).items():
            if name in entries:
                raise UserError(
                    f"{file}: tensor '{name}' is in {entries[name].file.name} too; keep one of the two copies"
                )
            if name not in weight_map:
                raise UserError(f"{file}: tensor '{name}' is not in weight_map of {index.name}; {DOWNLOAD_AGAIN}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file != shards[shard]:
            raise UserError(f"{index}: tensor '{name}' is not in its shard '{shard}'; {DOWNLOAD_AGAIN}")
    return entries


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"{folder / pickles[0]}: pickled weights can run code when loaded and are refused; convert "
            "them to safetensors (load them where you trust them, then save_pretrained)"
        )
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return f"{folder / INDEX_FILE}: the index is missing beside {shards[0].name}; download it"
    return f"{folder}: holds no {SINGLE_FILE}, no {INDEX_FILE}; give a folder with safetensors weights"
