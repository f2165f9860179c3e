"""Answers to `deltanet-hf convert`: whether a result could be exported, and whether a model is Qwen3.5."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError
from deltanet_hf.hub import model_folder
from deltanet_hf.inside import check_links

from ..storage.safetensors_folder import read_json
from .import_qwen3_5 import is_qwen3_5
from .obstacles import FORMATS, teacher_limits
from .slots import uneven_note


def check_exportable(name: str, teacher_config: PreTrainedConfig, softmax: list[int]) -> list[str]:
    """Checks whether a teacher can be exported after a conversion with `--profile qwen3_5`.

    Args:
        name: of the teacher, for messages.
        softmax: the layers that keep softmax attention.

    Returns:
        Notes about formats in which it could not be written, or in which it would cost more.

    Raises:
        UserError: no format is possible; the message lists every obstacle and its remedy.
    """
    found = teacher_limits(teacher_config, softmax)
    refused = [obstacle for obstacle in found if obstacle.formats == FORMATS]
    if refused:
        listed = "".join(f"\n  {obstacle} ({', '.join(obstacle.formats)})" for obstacle in refused)
        raise UserError(f"{name}: --profile qwen3_5: the result could not be exported:{listed}")
    notes = [f"Not for {' and '.join(obstacle.formats)}: {obstacle}" for obstacle in found]
    uneven = uneven_note(softmax, int(teacher_config.num_hidden_layers))  # type: ignore[attr-defined]
    return notes if uneven is None else [*notes, uneven]


def qwen3_5_folder(teacher: str, revision: str | None = None) -> Path | None:
    """The model's folder if it holds a Qwen3.5 text model, which is imported instead of converted."""
    folder = model_folder(teacher, revision, weights=False)
    if not folder.is_dir():
        return None
    check_links(folder)
    file = folder / "config.json"
    return model_folder(teacher, revision) if file.is_file() and is_qwen3_5(read_json(file)) else None
