"""Reads a recipe: the YAML file, then `key=value` overrides, then every check, before any model is loaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from deltanet_hf.data.text_files import plain_suffix, text_format
from deltanet_hf.errors import UserError, did_you_mean, one_line
from deltanet_recipes.schema import DistilBase, Recipe, stage_name
from deltanet_recipes.schema_sections import Data, Strict
from deltanet_recipes.shipped import recipe_path


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: a YAML file, or the name of a shipped recipe (`shipped.recipe_path`). Relative paths in the file are
            relative to the working directory.
        overrides: strings `dotted.key=value` that replace values of the file. List elements are addressed by number
            or, for stages, by name or kind (`stages.distil.tokens=1000000`); values are parsed as YAML;
            `stages.align=null` leaves a stage out.

    Raises UserError with one line per problem.
    """
    recipe = read_recipe(path, overrides)
    _check_files(Path(path), recipe)
    return recipe


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """As `load_recipe`, but without a look at the files that the recipe names."""
    path = recipe_path(path)
    try:
        tree = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except Exception as error:  # beside YAML's own errors, those of its dates and numbers, and of deep nesting
        raise UserError(f"{path}: not valid YAML: {one_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys, but this file holds a {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    if isinstance(tree.get("stages"), list):
        tree["stages"] = [stage for stage in tree["stages"] if stage is not None]
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise UserError(_describe(path, error)) from None


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's own loader drops the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for index, (key, _) in enumerate(node.value) if key.value in keys[:index]), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice.value} is there twice", twice.start_mark)
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def _parsed(text: str) -> Any:
    loader = _Once(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: write it as key=value, for example stages.long.tokens=1000000")
    try:
        value = _parsed(text)
    except Exception:  # of many types, as above
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
    """The index of `part` in a section: `part` itself in a mapping; in a list, its number or the stage's place."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list):
        if part.isdecimal() and int(part) < len(node):
            return int(part)
        names = [(item.get("kind"), item.get("name")) if isinstance(item, dict) else () for item in node]
        for index, found in enumerate(names):
            if part in found or (part == "distill" and "distil" in found):  # as the command is called
                return index
        distinct = dict.fromkeys(str(name) for found in names for name in found if name)
        known = ", ".join(distinct) or f"numbers below {len(node)}"
        raise UserError(f"override {key}: {parent} has no element {part!r}; it has {known}")
    raise UserError(f"override {key}: {parent} is a value, not a section")


def _describe(path: Path, error: ValidationError) -> str:
    """One line per problem: the file, the key and the message."""
    kinds = {"align", "distil", "long"}
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"] if part not in kinds) or "recipe"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            meant = did_you_mean(str(problem["loc"][-1]), _keys(Strict))
            message = f"unknown key{meant}; docs/recipe-keys.md lists the keys"
        elif problem["type"] == "missing":
            message = "this key is required"
        lines.append(f"{path}: {where}: {message}")
    return "\n".join(lines)


def _keys(section: type[BaseModel]) -> set[str]:
    """The keys of a section and of all that derive from it."""
    return set(section.model_fields).union(*map(_keys, section.__subclasses__()))


def _check_files(path: Path, recipe: Recipe) -> None:
    """Refuse a recipe that names files, folders or trackers that do not exist, or a student that is its own teacher."""
    problems = []
    student = Path(recipe.student)
    if not os.path.isfile(student / "config.json"):  # False also for what no file can be called
        problems.append(f"student: {student} is not a model folder; make one with `deltanet-hf convert`")
    if recipe.teacher is None and os.path.isdir(student) and not (student / "conversion.json").is_file():
        problems.append(
            f"student: {student} has no conversion.json, which names its teacher; give a folder that `deltanet-hf "
            "convert` wrote, or teacher=FOLDER"
        )
    if recipe.teacher is not None and os.path.isdir(student) and student.resolve() == Path(recipe.teacher).resolve():
        problems += [
            f"stages.{stage_name(stage)}.ce_weight: the student is its own teacher, and only text can teach it; set it"
            for stage in recipe.stages
            if isinstance(stage, DistilBase) and not stage.ce_weight and stage.cache_bits == 16
        ]
    problems += _missing_files(recipe.data)
    problems += [
        f"log.trackers: {name} is not installed; `pip install {name}`"
        for name in recipe.log.trackers
        if importlib.util.find_spec(name) is None  # accelerate would silently do without it
    ]
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems))


def _missing_files(data: Data) -> list[str]:
    problems = []
    named = [*(source.path for source in data.sources if source.path is not None), *data.decontaminate]
    if missing := [f"{name} does not exist" for name in named if not os.path.exists(name)]:
        remedy = "'data.decontaminate=[]' 'data.sources=[{path: FILE}]'"
        problems.append(f"data: {', '.join(missing)}; to train on text of your own, give {remedy}")
    for index, source in enumerate(data.sources):
        if source.path is not None and os.path.isfile(source.path) and not _is_known_kind(Path(source.path)):
            problems.append(
                f"data.sources.{index}.path: {source.path} is none of .txt, .md, .jsonl, .npy (each also as .gz or "
                ".xz) and .parquet"
            )
    return problems


def _is_known_kind(path: Path) -> bool:
    return text_format(path) is not None or plain_suffix(path) == ".npy"
