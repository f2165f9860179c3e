"""What `deltanet-hf convert` asks of this package: refuse what could not be exported, take Qwen3.5 checkpoints in."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError

from ..storage.safetensors_folder import read_json
from ..storage.teacher_source import resolve_source
from .export_command import progress_bar
from .import_qwen3_5 import is_native, plan_import, write_import
from .obstacles import FORMATS, planned_obstacles
from .slots import uneven_note


def refuse_unexportable(name: str, teacher_config: PreTrainedConfig, softmax: list[int]) -> list[str]:
    """Checks that a conversion by `--profile qwen3_5` could be exported.

    Args:
        name: of the teacher, for messages.
        softmax: the layers that are to keep softmax attention.

    Returns:
        Notes about formats that cannot be written, or that cost more with this choice of layers.

    Raises:
        UserError: another choice of layers or teacher is necessary; lists every obstacle and its remedy.
    """
    found = planned_obstacles(teacher_config, softmax)
    refused = [obstacle for obstacle in found if obstacle.formats == FORMATS]
    if refused:
        listed = "".join(f"\n  {obstacle} ({', '.join(obstacle.formats)})" for obstacle in refused)
        raise UserError(f"{name}: --profile qwen3_5: the result could not be exported:{listed}")
    notes = [f"Not for {' and '.join(obstacle.formats)}: {obstacle}" for obstacle in found]
    uneven = uneven_note(softmax, int(teacher_config.num_hidden_layers))  # type: ignore[attr-defined]
    return notes if uneven is None else [*notes, uneven]


def native_folder(teacher: str) -> Path | None:
    """The teacher's folder when it holds a Qwen3.5 text model, which is renamed and not converted."""
    folder = Path(teacher).expanduser()
    if not folder.exists():
        folder = resolve_source(teacher, Path("unused"), None).folder
    file = folder / "config.json"
    return folder if file.is_file() and is_native(read_json(file)) else None


def import_native(
    folder: Path,
    out: Path,
    dtype: torch.dtype | None,
    shard_size: int,
    *,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    console: Console,
) -> None:
    """Imports `folder` into `out`; with `dry_run`, only checks it and says what would be written."""
    out = out.expanduser().absolute()
    if out == folder.resolve() or folder.resolve() in out.parents:
        raise UserError(f"{out}: lies in the model's folder {folder}; choose another place")
    plan = plan_import(folder, dtype, shard_size)
    what = "an export of ours, which is undone" if plan.record else "a Gated DeltaNet model already: nothing is fitted"
    console.print(f"{folder} is {what}.", highlight=False)
    console.print(f"To write: {plan.config.model_type}, {plan.layout.nbytes / 1e9:.2f} GB.", highlight=False)
    if dry_run:
        return
    with progress_bar(console, "importing") as report:
        write_import(plan, out, resume=resume, overwrite=overwrite, progress=report)
    console.print(f"Written to {out}", highlight=False)
