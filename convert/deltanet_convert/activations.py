"""The hidden states between two layers, in memory and, for a resumed run, in one file of the workspace."""

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
    """Inputs of the next decoder layer, [n, T, hidden] float32."""

    calibration: Tensor  # the teacher's
    held_out: Tensor  # the teacher's
    student: Tensor  # the converted model's own, on the held-out text

    def save(self, folder: Path, step: int) -> None:
        """Writes `activations-STEP`, complete or not at all."""
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
        """Reads what `save` wrote, given the shapes."""
        path, tensors = _path(folder, step), []
        try:
            with path.open("rb") as stream:
                for shape in (calibration, held_out, held_out):
                    count = int(np.prod(shape))
                    tensors.append(torch.from_numpy(np.fromfile(stream, np.float32, count)).view(shape))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: damaged or missing ({error}); begin again with --overwrite") from error
        return cls(*tensors)

    @staticmethod
    def forget(folder: Path, step: int) -> None:
        _path(folder, step).unlink(missing_ok=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"activations-{step}.bin"
