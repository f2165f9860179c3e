"""The models of a report: a teacher, its students, and their untrained baselines."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

import deltanet_hf  # noqa: F401  registers the model families
from deltanet_hf.cpu_dtype import loading_dtype
from deltanet_hf.errors import UserError, one_line
from deltanet_hf.evaluation.baselines import (
    switch_off_linear,
    switch_off_softmax,
    switch_off_state,
    switch_off_window,
    untrained,
)
from deltanet_hf.evaluation.training_free import longest_window, with_windows
from deltanet_hf.hub import loadable_folder, model_folder
from deltanet_hf.loading import chosen_device, load_model, load_tokenizer
from deltanet_hf.mixers.window import WindowSettings
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits, stored_bytes
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.restrict import restrict_to_window

DEFAULT_BASELINES = ("window", "equal-bytes", "linear-off")
BASELINES = (*DEFAULT_BASELINES, "ablations")
BYTES_AT = 2048  # tokens of the sequence at which untrained windows have the bytes of a student
Change = Callable[[PreTrainedModel, PreTrainedModel], PreTrainedModel]


@dataclass(frozen=True)
class ModelRow:
    """A row of the report: one model.

    Attributes:
        kind: "teacher", "student" or "baseline".
        folder: folder or Hub id of the weights.
        tokens: number of training tokens according to recipe.json; 0 for teachers and untrained models.
        change: function (newly loaded model, teacher) -> model that makes a baseline, in place; None for none.
    """

    name: str
    kind: str
    folder: str
    tokens: int = 0
    change: Change | None = None


def line_up(teacher: str, students: list[str], baselines: tuple[str, ...]) -> list[ModelRow]:
    """All rows in order: the teacher, its window baseline, then each student followed by its baselines.

    Args:
        students: folders or Hub ids, or NAME=FOLDER.
        baselines: names in `BASELINES`. `equal-bytes` is what costs no training, with caches of a student's bits: the
            teacher; a student without states before its training; for a student with states the teacher with windows
            of equal bytes, and the same with the softmax layers that the student kept. `linear-off` applies to students
            with states that kept such layers; `ablations` takes softmax layers, windows beside states and those states
            away from a student, one kind per row.

    Raises UserError if two rows have the same name, or a student cannot be found.
    """
    rows = [ModelRow("teacher", "teacher", teacher)]
    if "window" in baselines:
        window = WindowSettings()
        name = f"window {window.window} + {window.sinks} sinks"
        rows.append(ModelRow(name, "baseline", teacher, change=partial(_of_itself, restrict_to_window)))
    for text in students:
        name, folder = named(text)
        if name in {row.name for row in rows}:
            raise UserError(f"{text}: two rows would be called {name!r}; name them with NAME=FOLDER")
        place = model_folder(folder)
        rows.append(ModelRow(name, "student", folder, training_tokens(place)))
        table = _table(place)
        if table is None:
            continue
        states = any(kind.mixer.has_state for kind in table.converted.values())
        hybrid = states and bool(table.softmax)
        if "equal-bytes" in baselines:
            quantised = f"teacher, cache in {table.cache_bits} bits"
            if table.cache_bits < 16 and quantised not in {row.name for row in rows}:
                rows.append(ModelRow(quantised, "baseline", folder, change=_teacher_in_bits))
            if not any(kind.has_new_weights for kind in table.converted.values()):
                rows.append(ModelRow(f"{name}, untrained", "baseline", folder, change=untrained))
            if states:
                rows.append(ModelRow(f"untrained windows, bytes of {name}", "baseline", folder, change=_windows))
            if hybrid:
                rows.append(
                    ModelRow(f"kept layers of {name}, untrained windows", "baseline", folder, change=_kept_layers)
                )
        if "linear-off" in baselines and hybrid:
            rows.append(
                ModelRow(
                    f"{name}, linear layers off", "baseline", folder, change=partial(_of_itself, switch_off_linear)
                )
            )
        for what, ablation in _ablations(table, hybrid) if states and "ablations" in baselines else ():
            rows.append(ModelRow(f"{name}, {what} off", "baseline", folder, change=partial(_of_itself, ablation)))
    return rows


def _of_itself(
    change: Callable[[PreTrainedModel], PreTrainedModel], model: PreTrainedModel, teacher: PreTrainedModel
) -> PreTrainedModel:
    """A change that does not read the teacher."""
    return change(model)


def _teacher_in_bits(model: PreTrainedModel, teacher: PreTrainedModel) -> PreTrainedModel:
    return set_cache_bits(copy.deepcopy(teacher), cache_bits_of(model))


def _windows(model: PreTrainedModel, teacher: PreTrainedModel) -> PreTrainedModel:
    return _of_equal_bytes(model, teacher, ())


def _kept_layers(model: PreTrainedModel, teacher: PreTrainedModel) -> PreTrainedModel:
    return _of_equal_bytes(model, teacher, tuple(LayerTable.of(model.config).softmax))


def _of_equal_bytes(model: PreTrainedModel, teacher: PreTrainedModel, kept: tuple[int, ...]) -> PreTrainedModel:
    """The teacher with untrained windows in the bits of the student: the shortest ones with at least as many bytes.

    It is the teacher itself if all have fewer.
    """
    bits = cache_bits_of(model)
    smaller = longest_window(teacher, kept, stored_bytes(model, BYTES_AT, bits) - 1, BYTES_AT, bits) or 0
    window = None if smaller == BYTES_AT else smaller + 1
    return set_cache_bits(with_windows(teacher, kept, window), bits)


def _ablations(table: LayerTable, softmax: bool) -> list[tuple[str, Callable[[PreTrainedModel], PreTrainedModel]]]:
    """The parts that can be taken away from a student with these layers, by name."""
    found: list[tuple[str, Callable[[PreTrainedModel], PreTrainedModel]]] = []
    if softmax:
        found.append(("softmax", switch_off_softmax))
    if any(kind.recurrent is not None and kind.recurrent.window for kind in table.converted.values()):
        found += [("window", switch_off_window), ("state", switch_off_state)]
    return found


def named(text: str) -> tuple[str, str]:
    """Name and folder of a student that is given as FOLDER or NAME=FOLDER."""
    name, separator, folder = text.partition("=")
    if name and separator and not os.path.exists(text):
        return name, folder
    parts = [part for part in Path(text).parts if part not in ("final", "/")]
    return (parts[-1] if parts else text), text


def _table(folder: Path) -> LayerTable | None:
    """The layers of the model in a folder; None for a folder without config.json and a model as it was."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    if config.get("deltanet") is None:
        return None
    try:
        return LayerTable.from_dict(config["deltanet"], config["num_hidden_layers"])
    except ValueError as error:
        raise UserError(f"{path}: {one_line(error)}") from error


def training_tokens(folder: Path) -> int:
    """Number of training tokens of a distilled model, from the stages in its recipe.json; 0 if there is none."""
    path = folder / "recipe.json"
    if not path.is_file():
        return 0
    try:
        stages = json.loads(path.read_text()).get("stages", [])
        return sum(int(stage.get("tokens", 0)) for stage in stages)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is no recipe of a run ({one_line(error, 200)}); copy it again, or remove it"
        ) from error


class ModelRows:
    """Loads the models of the rows one at a time; only the teacher stays in memory, for the KL divergence."""

    def __init__(self, rows: list[ModelRow], device: str | None, dtype: str) -> None:
        self.rows = rows
        self.device = chosen_device(device)
        self.dtype = loading_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(rows[0].folder, loadable_folder(rows[0].folder))
        self.teacher = self._load(rows[0].folder)

    def model(self, row: ModelRow) -> PreTrainedModel:
        """The model of a row, in eval mode on the device. Raises UserError if it cannot be loaded or compared."""
        if row.kind == "teacher":
            return self.teacher
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        model = self._load(row.folder)
        self._check(row, model)
        return row.change(model, self.teacher) if row.change else model

    def _load(self, folder: str) -> PreTrainedModel:
        model = load_model(folder, loadable_folder(folder), self.dtype)
        nn.Module.to(model, self.device)  # transformers' own `to` is not typed
        return model

    def _check(self, row: ModelRow, model: PreTrainedModel) -> None:
        if model.get_output_embeddings().weight.shape[0] != self.teacher.get_output_embeddings().weight.shape[0]:
            raise UserError(f"{row.folder}: its vocabulary differs from the teacher's; a report uses one tokenizer")
