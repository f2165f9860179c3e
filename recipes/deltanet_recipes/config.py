"""Read a recipe: YAML, then `key=value` overrides, then every check, before anything is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deltanet_hf.errors import UserError
from deltanet_recipes.schema import Data, Recipe, Repair, Source


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe of a YAML file.

    Overrides are `dotted.key=value`; list elements are addressed by number or, for stages, by name or kind
    (`stages.distil.tokens=1000000`); values are parsed as YAML; `stages.align=null` leaves a stage out. Relative
    paths in the file are relative to the working directory. Raises UserError with one line per problem.
    """
    recipe = read_recipe(Path(path), overrides)
    _check_files(Path(path), recipe)
    return recipe


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """As `load_recipe`, without looking for the files that the recipe names."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys, this is {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    if isinstance(tree.get("stages"), list):
        tree["stages"] = [stage for stage in tree["stages"] if stage is not None]
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise UserError(_describe(path, error)) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: write it as key=value, for example stages.distil.tokens=1000000")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    *parents, last = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[_position(node, part, key, ".".join(parents[:depth]))]
    if not isinstance(node, (dict, list)):
        raise UserError(f"override {override!r}: {'.'.join(parents)} is a value, not a section")
    node[_position(node, last, key, ".".join(parents))] = value


def _position(node: Any, part: str, key: str, parent: str) -> Any:
    """The index of `part` in a section: itself in a mapping, a number or stage label in a list."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list):
        if part.isdigit() and int(part) < len(node):
            return int(part)
        for index, item in enumerate(node):
            if isinstance(item, dict) and part in (item.get("name"), item.get("kind")):
                return index
        raise UserError(f"override {key}: {parent} has no element {part!r}")
    raise UserError(f"override {key}: {parent} is a value, not a section")


def _describe(path: Path, error: ValidationError) -> str:
    """One line per problem: where, what."""
    kinds = {"align", "distil", "long", "repair"}
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"] if part not in kinds) or "recipe"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown key; see recipes/README.md for the keys there are"
        elif problem["type"] == "missing":
            message = "this key is required"
        lines.append(f"{path}: {where}: {message}")
    return "\n".join(lines)


def _check_files(path: Path, recipe: Recipe) -> None:
    """Everything the recipe names on disk must be there before any work begins."""
    problems = []
    student = Path(recipe.student)
    if not (student / "config.json").is_file():
        problems.append(f"student: {student} is not a model folder; make one with `deltanet-hf convert`")
    if (
        recipe.baseline is None
        and recipe.teacher is None
        and student.is_dir()
        and not (student / "conversion.json").is_file()
    ):
        problems.append(f"teacher: {student} has no conversion.json that names its teacher; set this key")
    stage_data = [stage.data for stage in recipe.stages if isinstance(stage, Repair) and stage.data is not None]
    for data in (recipe.data, *stage_data):
        problems += _missing_files(data)
    for stage in recipe.stages:
        data = stage.data or recipe.data if isinstance(stage, Repair) else recipe.data
        if isinstance(stage, Repair) and not any(source.messages_key for source in data.sources):
            problems.append("stages.repair: no data source has messages_key, so there are no completions")
    problems += [
        f"log.trackers: {name} is not installed; `pip install {name}`"
        for name in recipe.log.trackers
        if importlib.util.find_spec(name) is None  # accelerate would silently do without it
    ]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))


def _missing_files(data: Data) -> list[str]:
    problems = []
    for index, source in enumerate(data.sources):
        if source.path is not None and not Path(source.path).is_file():
            problems.append(f"data.sources.{index}.path: {source.path} does not exist")
        elif source.path is not None and file_kind(source) is None:
            problems.append(
                f"data.sources.{index}.path: {source.path} is none of .txt, .jsonl, .jsonl.gz, .jsonl.xz, "
                ".parquet, .npy, .npy.xz"
            )
    problems += [f"data.decontaminate: {name} does not exist" for name in data.decontaminate if not Path(name).exists()]
    return problems


def file_kind(source: Source) -> str | None:
    """txt, jsonl, parquet or npy, by the file's name; None for anything else."""
    name = str(source.path)
    for ending in (".gz", ".xz"):
        name = name.removesuffix(ending)
    kind = Path(name).suffix.removeprefix(".")
    return kind if kind in {"txt", "jsonl", "parquet", "npy"} else None
