"""Checks and plans a conversion before any work begins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.file_lock import locked_beside
from deltanet_hf.loading import chosen_device
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.publish import Workspace, check_target

from .calibration_text import read_text
from .conversion_plan import Plan, make_plan
from .export.obstacles import teacher_obstacles
from .keep_option import check_keep, chosen_layers, table_of
from .options import ConvertOptions
from .select.for_convert import selection_path
from .select.run import Show, unseen
from .select.selection_file import Selection
from .select.teacher_defaults import with_defaults
from .storage.teacher_source import resolve_source
from .teacher_model import Teacher, open_teacher


@dataclass(frozen=True)
class Job:
    """A conversion that is checked and planned but has not begun."""

    teacher: Teacher
    options: ConvertOptions
    table: LayerTable
    dtype: torch.dtype
    plan: Plan
    device: torch.device
    selection: Selection | None = None  # what a budget of `--keep` chose


def prepare(teacher: str, out: Path, options: ConvertOptions, show: Show = unseen) -> Job:
    """Finds and checks the teacher and plans the conversion; a budget of `--keep` is spent first.

    Nothing is written except the dequantised copy of a GGUF teacher and the file of an automatic selection.

    Args:
        teacher: a folder, a hub id or a .gguf file.
        out: the folder that will be made.
        show: called with the progress of an automatic selection.

    Raises:
        UserError: the teacher, an option or the output folder cannot be used.
    """
    check_target(out)
    check_keep(options)
    if options.text is not None:
        read_text(options.text, 1)  # refused before anything is measured
    device = chosen_device(options.device)
    source = resolve_source(teacher, _teacher_copy(out), options.torch_dtype, options.revision)
    _check_apart(source.folder, out)
    opened = open_teacher(source)
    options = with_defaults(options, opened)
    kept = chosen_layers(opened, out, options, show)
    table = table_of(options, kept, opened.config)
    if not table.converted and not table.key_order:
        raise UserError(
            f"--keep {options.keep}: keeps all {len(table)} layers; leave at least one to convert, or take "
            "--cache-bits 4, whose keys are measured"
        )
    # Qwen3.5's softmax layers have q/k norms. None are inserted if something else prevents an export.
    insert_norms = options.profile == "qwen3_5" and not teacher_obstacles(opened.config, table.softmax)
    dtype = options.torch_dtype or (torch.float32 if opened.dtype == torch.float64 else opened.dtype)
    plan = make_plan(opened, table, dtype, options.shard_size, options.calibration_tokens, insert_norms)
    selection = kept if isinstance(kept, Selection) and options.automatic else None
    return Job(opened, options, table, dtype, plan, device, selection)


@contextmanager
def sole_conversion(out: Path) -> Iterator[None]:
    """Keeps other processes from converting to `out`, also before `publish_folder` does, while a job is prepared.

    At the end, the copy of a GGUF teacher and the file of an automatic selection are removed; after an error the copy,
    unless an interrupted conversion can resume with it. What is killed leaves both.

    Raises:
        UserError: another process converts to `out`, or `out` cannot be made.
    """
    check_target(out)
    with locked_beside(out, "conversion"):
        try:
            yield
        except (UserError, QualityError, ModuleNotFoundError):
            if not Workspace(out).folder.exists():
                shutil.rmtree(_teacher_copy(out), ignore_errors=True)
            raise
        shutil.rmtree(_teacher_copy(out), ignore_errors=True)
        selection_path(out).unlink(missing_ok=True)


def _teacher_copy(out: Path) -> Path:
    """Where a GGUF teacher is dequantised to."""
    return out.parent / f".{out.name}.teacher"


def _check_apart(teacher: Path, out: Path) -> None:
    first, second = teacher.resolve(), out.resolve()
    if first == second or first in second.parents or second in first.parents:
        raise UserError(f"{out}: overlaps the teacher's folder {teacher}; choose another output folder")
