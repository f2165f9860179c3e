"""The tensors that the header of a safetensors file names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deltanet_hf.errors import UserError, one_line

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DOWNLOAD_AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; `dtype` is the format's name of it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        return (self,)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, by name; no data is read.

    Raises UserError if the file cannot be read, holds no tensors, or others than plain floats, or if the safetensors
    library refuses it: it is cut, its header is not of the format, or shapes and offsets contradict each other,
    overlap, leave bytes unused or leave the file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
            entries = {name: TensorEntry(name, file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error, 200)}); {DOWNLOAD_AGAIN}") from error
    if not entries:
        raise UserError(f"{file}: holds no tensors; {DOWNLOAD_AGAIN}")
    for entry in entries.values():
        if entry.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{file}: tensor '{entry.name}' has dtype {entry.dtype}, not a plain float; dequantise the teacher "
                "first (save it as bfloat16)"
            )
    return entries
