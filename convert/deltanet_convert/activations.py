"""The hidden states between two decoder layers: in memory and, for a resumed run, in a file of the hidden folder."""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import replacing


@dataclass
class Activations:
    """Inputs of the next decoder layer, [n, T, hidden] float32: n sequences of T tokens."""

    calibration: Tensor  # the teacher's, on the calibration text
    held_out: Tensor  # the teacher's, on the held-out text
    student: Tensor  # the converted model's, on the held-out text

    def save(self, folder: Path, step: int) -> None:
        """Writes the file `activations-STEP.bin` with a sum of its bits at the end, completely or not at all."""
        path, total = _path(folder, step), np.uint64(0)
        with replacing(path) as temporary, temporary.open("wb") as stream:
            for field in fields(self):
                values = getattr(self, field.name).contiguous().numpy()
                total += _sum(values)
                values.tofile(stream)
            stream.write(total.tobytes())

    @classmethod
    def load(cls, folder: Path, step: int, calibration: tuple[int, ...], held_out: tuple[int, ...]) -> "Activations":
        """Reads the file that `save` wrote; `calibration` and `held_out` are the shapes of the tensors.

        Raises:
            UserError: the file is missing or has changed.
        """
        path, total, tensors = _path(folder, step), np.uint64(0), []
        try:
            with path.open("rb") as stream:
                for shape in (calibration, held_out, held_out):
                    values = np.fromfile(stream, np.float32, int(np.prod(shape)))
                    total += _sum(values)
                    tensors.append(torch.from_numpy(values).view(shape))
                if stream.read() != total.tobytes():
                    raise RuntimeError("the sum of its bits differs")
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: damaged or missing ({error}); start again with --overwrite") from error
        return cls(*tensors)

    @staticmethod
    def forget(folder: Path, step: int) -> None:
        """Removes the file of a step, if it exists."""
        _path(folder, step).unlink(missing_ok=True)


def _sum(values: np.ndarray) -> np.uint64:
    """The sum of the float32 values' bits, read as integers, which takes a quarter of the time of a SHA-256."""
    return np.add.reduce(values.reshape(-1).view(np.uint32), dtype=np.uint64)


def _path(folder: Path, step: int) -> Path:
    return folder / f"activations-{step}.bin"
