"""Reads and checks the header of one safetensors file before a byte of its data is trusted.

The format: the length of the header in 8 bytes, little-endian; the header as JSON, {name: {dtype, shape,
data_offsets}}; the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltanet_hf.errors import UserError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_NAME = 300  # characters
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
DOWNLOAD_AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class TensorEntry:
    """Position of one tensor: `start` and `end` count bytes from the beginning of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        return (self,)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file.

    Raises UserError naming the file and the tensor when the file is truncated, the header is too large or
    not JSON, a name occurs twice, a shape contradicts its offsets, or offsets overlap, leave holes or leave
    the file.
    """
    raw, data_start, size = _header_bytes(file)
    entries = [_entry(file, name, value, data_start, size) for name, value in _parse(file, raw).items()]
    _check_layout(file, entries, data_start, size)
    return {entry.name: entry for entry in entries}


def _header_bytes(file: Path) -> tuple[bytes, int, int]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise UserError(f"{file}: truncated safetensors file of {size} bytes; {DOWNLOAD_AGAIN}")
            if length > MAX_HEADER_BYTES:
                raise UserError(
                    f"{file}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}: not a "
                    f"safetensors file, or a damaged one; {DOWNLOAD_AGAIN}"
                )
            if length > size - 8:
                raise UserError(
                    f"{file}: truncated: the header should take {length} bytes but the file has {size}; "
                    f"{DOWNLOAD_AGAIN}"
                )
            return stream.read(length), 8 + length, size
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check the path and its permissions") from error


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(f"{file}: tensor '{key}' occurs twice in the header; save the checkpoint again")
            seen[key] = value
        return seen

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: the safetensors header is not JSON; {DOWNLOAD_AGAIN}") from error
    if not isinstance(header, dict):
        raise UserError(f"{file}: the safetensors header is not a JSON object; {DOWNLOAD_AGAIN}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{file}: '__metadata__' in the header is not a mapping of texts; save the checkpoint again")
    return header


def _entry(file: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    if not name.isprintable() or len(name) > MAX_NAME:
        raise UserError(
            f"{file}: tensor {name[:50]!r} has a name of {len(name)} characters, expected at most {MAX_NAME}, all of "
            "them printable; save the checkpoint again"
        )
    where = f"{file}: tensor '{name}'"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise UserError(f"{where} has no dtype, shape and data_offsets in the header; save the checkpoint again")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UserError(
            f"{where} has unknown dtype {str(dtype)[:50]!r}; save the checkpoint as float32, bfloat16 or float16"
        )
    if not _is_ints(shape) or not _is_ints(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(
            f"{where} has a bad shape {shape!r:.100} or data_offsets {offsets!r:.100}; save the checkpoint again"
        )
    begin, end = offsets
    if data_start + end > size:
        raise UserError(f"{where} ends at byte {data_start + end} but the file has {size}: truncated; {DOWNLOAD_AGAIN}")
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != needed:
        raise UserError(
            f"{where} of shape {shape} and dtype {dtype} needs {needed} bytes but its data_offsets "
            f"{offsets} hold {end - begin}; save the checkpoint again"
        )
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(file: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    position, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda e: (e.start, e.end)):
        if entry.start != position:
            problem = "overlaps" if entry.start < position else "leaves a hole after"
            raise UserError(f"{file}: tensor '{entry.name}' {problem} {previous}; save the checkpoint again")
        position, previous = entry.end, f"'{entry.name}'"
    if position != size:
        raise UserError(f"{file}: {size - position} bytes after the last tensor belong to none; {DOWNLOAD_AGAIN}")
