"""Loads teacher and student, checks that they belong together, and finds their parts."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from deltanet_convert.storage.safetensors_folder import read_json
from deltanet_convert.storage.scratch import scratch_folder
from deltanet_convert.storage.teacher_source import resolve_source
from deltanet_hf import loading  # its package registers the converted families
from deltanet_hf.errors import UserError
from deltanet_hf.hub import loadable_folder
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.model_types import PREFIX, UNPACKABLE, family_type
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.qwen3_5 import MODEL_TYPE
from deltanet_recipes.schema import Align, Recipe, Stage, stage_name

RECORD = "conversion.json"
T = TypeVar("T")


class TeacherName(NamedTuple):
    """A folder, .gguf file or Hub id, and the commit on the Hub that the student was converted from."""

    name: str
    revision: str | None


def load_student(folder: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The student, in `dtype` or, by default, in the dtypes of its folder. Raises UserError if it cannot be loaded."""
    return _load(folder, "student", dtype or "auto")


def stored_dtype(student: PreTrainedModel, folder: str) -> torch.dtype:
    """The dtype in which the student's folder is stored."""
    stored = read_json(Path(folder) / "config.json").get("dtype")
    return getattr(torch, stored) if isinstance(stored, str) else student.dtype


def load_teacher(recipe: Recipe, dtype: torch.dtype) -> PreTrainedModel:
    """The teacher in `dtype`, frozen, with SDPA attention. Raises UserError if it cannot be loaded."""
    name, revision = teacher_of(recipe)
    return _load(name, "teacher", dtype, revision).requires_grad_(False)


def check_models(recipe: Recipe) -> PreTrainedConfig:
    """Compare the configs of student and teacher, without loading weights. Returns the student's.

    Raises UserError if the student is no converted model, if the teacher cannot teach it, or if a stage has nothing to
    train in it.
    """
    folder, (name, revision) = recipe.student, teacher_of(recipe)
    student = _opened(loading.load_config, folder, "student")
    if not student.model_type.startswith(PREFIX):
        raise UserError(
            f"student: {folder} has model_type {student.model_type!r}, which is not a converted model; make one with "
            "`deltanet-hf convert`"
        )
    separator = recipe.data.separator
    if separator is not None and separator >= student.vocab_size:
        raise UserError(
            f"data.separator: got {separator}, but the student's token ids end at {student.vocab_size - 1}; "
            "set the id of its end-of-text token"
        )
    if recipe.data.isolate_documents and (family := family_type(student)) in UNPACKABLE:
        raise UserError(
            f"data.isolate_documents: softmax attention of {family} does not keep packed documents apart; set false"
        )
    config = _opened(loading.load_config, name, "teacher", revision)
    longest = int(config.get_text_config().max_position_embeddings)
    for stage in recipe.stages:
        if stage.sequence_length > longest and not getattr(stage, "far_ce_weight", 0.0):
            raise UserError(
                f"stages.{stage_name(stage)}.sequence_length: got {stage.sequence_length}, and the teacher's positions "
                f"end at {longest}; give fewer, or far_ce_weight to a student that reads further"
            )
        if stage.sequence_length > student.max_position_embeddings:
            raise UserError(
                f"stages.{stage_name(stage)}.sequence_length: got {stage.sequence_length}, and the student's positions "
                f"end at {student.max_position_embeddings}; give fewer, or convert the teacher with a larger --context"
            )
    if student.model_type == MODEL_TYPE:
        _check_imported(recipe, student, name, revision, config)
        return student
    _check_trainable(recipe, LayerTable.of(student))
    if config.model_type not in FAMILIES:
        raise UserError(f"teacher: {name} has model_type {config.model_type!r}, which is no supported teacher")
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if getattr(config, key) != getattr(student, key):
            raise UserError(
                f"teacher: {name} has {key} {getattr(config, key)}, the student {getattr(student, key)}: "
                "it is not the model this student was converted from"
            )
    return student


def _check_trainable(recipe: Recipe, table: LayerTable) -> None:
    """Refuse stages that would train nothing, because every converted layer has the teacher's weights (windows)."""
    if _has_new_weights(table):
        return
    for stage in recipe.stages:
        if not isinstance(stage, Align) and stage.train == "frozen":
            raise UserError(
                f"stages.{stage_name(stage)}: {recipe.student} has no layer with weights that its teacher does not "
                "have, so train: frozen trains nothing; use lora or full"
            )


def _has_new_weights(table: LayerTable) -> bool:
    return any(kind.has_new_weights for kind in table.converted.values())


def without_alignment(recipe: Recipe, student: PreTrainedConfig, stages: list[Stage]) -> list[Stage]:
    """The stages without those that align, if the student has windows only, whose weights are the teacher's.

    Args:
        student: its config.

    Raises UserError if none remains.
    """
    if student.model_type == MODEL_TYPE or _has_new_weights(LayerTable.of(student)):
        return stages
    rest: list[Stage] = [stage for stage in stages if not isinstance(stage, Align)]
    if not rest:
        raise UserError(f"stages: {recipe.student} has the weights of its teacher, so there is nothing to align")
    return rest


def _check_imported(recipe: Recipe, student: Any, name: str, revision: str | None, config: Any) -> None:
    """Check the teacher of an imported Qwen3.5 model, which may be any model with its vocabulary.

    Align stages are refused, because such a model was not made from softmax attention.
    """
    for stage in recipe.stages:
        if isinstance(stage, Align):
            raise UserError(
                f"stages.{stage_name(stage)}: {recipe.student} is a Qwen3.5 model, whose linear layers have no softmax "
                f"attention to be aligned to; leave the stage out (stages.{stage_name(stage)}=null)"
            )
    if config.model_type not in FAMILIES and not config.model_type.startswith(PREFIX):
        raise UserError(
            f"teacher: {name} has model_type {config.model_type!r}, which is no supported teacher; for a Qwen3.5 "
            "model give the folder that `deltanet-hf import` wrote"
        )
    hidden = any(getattr(stage, "hidden_weight", 0.0) > 0 for stage in recipe.stages)
    for key in ("vocab_size", *(("hidden_size", "num_hidden_layers") if hidden else ())):
        if getattr(config, key) != getattr(student, key):
            raise UserError(
                f"teacher: {name} has {key} {getattr(config, key)}, the student {getattr(student, key)}"
                + ("; give one with the same vocabulary" if key == "vocab_size" else "; set hidden_weight to 0")
            )
    own = load_tokenizer(recipe.student).get_vocab()
    for token, number in load_tokenizer(name, "teacher", revision).get_vocab().items():
        if own.get(token, number) != number:
            raise UserError(
                f"teacher: {name} has token {token!r} at {number}, the student at {own[token]}; give one with the "
                "same vocabulary"
            )


def teacher_of(recipe: Recipe) -> TeacherName:
    """The recipe's teacher, or else the one that the student's conversion.json names.

    A local teacher is looked for where it was, seen from the student, then beside the student. Raises UserError if no
    teacher is named, or a local one is not found.
    """
    if recipe.teacher is not None:
        return TeacherName(recipe.teacher, None)
    student = Path(recipe.student).absolute()
    recorded = read_json(Path(recipe.student) / RECORD).get("teacher")
    teacher: dict[str, Any] = recorded if isinstance(recorded, dict) else {"name": recorded}
    name = str(teacher.get("name") or teacher.get("path") or "")
    if not name:
        raise UserError(f"teacher: {student / RECORD} names no teacher; set this key (teacher=PATH)")
    if revision := teacher.get("revision"):
        return TeacherName(name, revision if isinstance(revision, str) else None)
    places = [Path(name), student.parent / name]
    if isinstance(teacher.get("folder"), str):
        places.insert(0, Path(os.path.normpath(student / teacher["folder"])))
    for place in places:
        # False also for what no file can be called
        if os.path.isfile(place / "config.json") or (place.suffix == ".gguf" and os.path.isfile(place)):
            return TeacherName(str(place), None)
    if "/" in name and not Path(name).is_absolute():
        return TeacherName(name, None)
    raise UserError(
        f"teacher: {student / RECORD} names {name!r}, but there is no model at {places[0]}; say where it is now: "
        "teacher=PATH"
    )


def load_tokenizer(folder: str, key: str = "student", revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; `key` is the recipe's key that an error names."""
    return _opened(loading.load_tokenizer, folder, key, revision)


def _opened(load: Callable[[str, Path], T], name: str, key: str, revision: str | None = None) -> T:
    """The result of `load` for a model's folder: downloaded if it is a Hub id, and of a .gguf file a copy for a while.

    Local folders have no revision.
    """
    try:
        if name.endswith(".gguf"):
            with scratch_folder() as copy:
                return load(name, resolve_source(name, copy, None).folder)
        return load(name, loadable_folder(name, None if os.path.exists(name) else revision))
    except UserError as error:
        raise UserError(f"{key}: {error}") from None


def _load(name: str, key: str, dtype: Any, revision: str | None = None) -> PreTrainedModel:
    model = _opened(partial(loading.load_model, dtype=dtype, attn_implementation="sdpa"), name, key, revision)
    model.config.use_cache = False
    return model


def gathered_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in main memory, gathered from all processes if it is sharded."""
    full = getattr(tensor, "full_tensor", None)
    gathered: torch.Tensor = full() if full is not None else tensor
    return gathered.detach().cpu()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers, which every supported family keeps at `model.layers`."""
    return model.model.layers  # type: ignore[union-attr, return-value]


def mixer_name(layer: nn.Module) -> str:
    """Name of the submodule in which a decoder layer keeps its attention or its mixer."""
    return "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"


def mixers(student: nn.Module) -> dict[int, Any]:
    """The mixers by layer index, without those whose weights are all the teacher's (`LayerKind.new_parts`)."""
    found = {index: layer.get_submodule(mixer_name(layer)) for index, layer in enumerate(decoder_layers(student))}
    return {index: mixer for index, mixer in found.items() if kind_of(mixer).new_parts()}


def is_imported(student: nn.Module) -> bool:
    """Whether the student is an imported Qwen3.5 model, whose mixers were pretrained with the rest of it."""
    return student.config.model_type == MODEL_TYPE  # type: ignore[union-attr, no-any-return]
