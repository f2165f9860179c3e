"""The hidden states between two decoder layers: in memory and, for a resumed run, in a file of the hidden folder."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import sync_folder, writing


@dataclass
class Activations:
    """Inputs of the next decoder layer, [n, T, hidden] float32: n sequences of T tokens."""

    calibration: Tensor  # the teacher's, on the calibration text
    held_out: Tensor  # the teacher's, on the held-out text
    student: Tensor  # the converted model's, on the held-out text

    def save(self, folder: Path, step: int) -> None:
        """Writes the file `activations-STEP.bin`, completely or not at all."""
        path = _path(folder, step)
        temporary = path.with_suffix(".tmp")
        with writing(path):
            with temporary.open("wb") as stream:
                for field in fields(self):
                    getattr(self, field.name).numpy().tofile(stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
            sync_folder(folder)

    @classmethod
    def load(cls, folder: Path, step: int, calibration: tuple[int, ...], held_out: tuple[int, ...]) -> "Activations":
        """Reads the file that `save` wrote; `calibration` and `held_out` are the shapes of the tensors.

        Raises:
            UserError: the file is missing or has another size.
        """
        path, tensors = _path(folder, step), []
        try:
            with path.open("rb") as stream:
                for shape in (calibration, held_out, held_out):
                    count = int(np.prod(shape))
                    tensors.append(torch.from_numpy(np.fromfile(stream, np.float32, count)).view(shape))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: damaged or missing ({error}); start again with --overwrite") from error
        return cls(*tensors)

    @staticmethod
    def forget(folder: Path, step: int) -> None:
        """Removes the file of a step, if it exists."""
        _path(folder, step).unlink(missing_ok=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"activations-{step}.bin"
