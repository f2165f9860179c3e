"""Read a study: a list of runs, each a recipe with overrides and a conversion, checked before anything begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from deltanet_hf.errors import UserError, one_line
from deltanet_recipes.config import read_recipe
from deltanet_recipes.schema import Recipe, stage_tokens
from deltanet_recipes.schema_sections import Strict

VARIABLE = re.compile(r"\$\{(\w+)\}")


class Conversion(Strict):
    """What `deltanet-hf convert` is told."""

    layers: str = Field("all", description="--layers")
    mixer: str = Field("gated_deltanet", description="--mixer")
    profile: str = Field("faithful", description="--profile")
    training: bool = Field(True, description="false: --no-training")
    set: dict[str, bool | int | str] = Field({}, description="--set, each key of it")
    fit_memory: bool = Field(True, description="false: --no-fit-memory")
    text: str | None = Field(None, description="--text; default: the text shipped with the project")
    calibration_tokens: int | None = Field(None, gt=0, description="--calibration-tokens")
    seed: int = Field(0, ge=0, description="--seed")

    @field_validator("text")
    @classmethod
    def _empty_is_none(cls, text: str | None) -> str | None:
        return text or None

    def arguments(self) -> list[str]:
        """The command line's."""
        arguments = ["--layers", self.layers, "--mixer", self.mixer, "--profile", self.profile]
        arguments += [] if self.training else ["--no-training"]
        for key, value in self.set.items():
            arguments += ["--set", f"{key}={json.dumps(value) if isinstance(value, bool) else value}"]
        arguments += [] if self.fit_memory else ["--no-fit-memory"]
        arguments += ["--text", self.text] if self.text else []
        arguments += ["--calibration-tokens", str(self.calibration_tokens)] if self.calibration_tokens else []
        return arguments + (["--seed", str(self.seed)] if self.seed else [])


class Run(Strict):
    """A row of the results: something trained and measured, or measured without training."""

    name: str = Field(..., description="of the row, and of the run's folder")
    recipe: str | None = Field(None, description="YAML file of the base recipe")
    untrained: Literal["teacher", "window", "start"] | None = Field(
        None, description="instead of a recipe, measure the teacher, it under 64 tokens + 4 sinks, or the conversion"
    )
    set: dict[str, Any] = Field({}, description="overrides of the recipe, `stages.distil.train: lora`")
    convert: Conversion = Field(default_factory=Conversion, description="options of the conversion, see below")
    keep: bool = Field(False, description="keep the trained model; else only its log and figures stay")

    @field_validator("name")
    @classmethod
    def _is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"{name!r} names a folder: use letters, digits and . _ + - only")
        return name

    @model_validator(mode="after")
    def _trained_or_not(self) -> Run:
        if (self.recipe is None) == (self.untrained is None):
            raise ValueError("give exactly one of recipe and untrained")
        return self


class Study(Strict):
    """The whole list and what all runs share."""

    teacher: str = Field(..., description="folder of the softmax model")
    arrays: str = Field(..., description="folder of the evaluation's token arrays (deltanet_recipes.study.results_row)")
    output: str = Field(..., description="folder of runs, conversions and logs")
    results: str = Field(..., description="JSON file that the rows are added to")
    runs: tuple[Run, ...] = Field(..., min_length=1, description="the rows of the results, see below")

    @field_validator("runs")
    @classmethod
    def _names_differ(cls, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        names = [run.name for run in runs]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two runs are called {repeated[0]!r}")
        return runs

    def recipe(self, run: Run, student: str) -> tuple[list[str], Recipe]:
        """The overrides of a run's recipe as typed on a command line, and the recipe; files are not looked for."""
        assert run.recipe is not None
        overrides = {
            "teacher": self.teacher,
            "student": student,
            "output": str(Path(self.output) / run.name),
            "data.cache": str(Path(self.output) / "tokens"),
            **run.set,
        }
        typed = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
        return typed, read_recipe(Path(run.recipe), typed)

    def tokens(self, run: Run) -> int:
        """Training tokens of a run: what its cost is judged by."""
        return 0 if run.recipe is None else sum(map(stage_tokens, self.recipe(run, "-")[1].stages))


def load_study(path: Path, given: Sequence[str] = ()) -> Study:
    """The validated study of a YAML file.

    `variables` of the file have values or null; `given` ("name=value") sets them; `${name}` in any string is replaced.
    `set` and `convert` at the top are the defaults of every run; keys that begin with `x-` hold YAML anchors and are
    passed over. Every run's recipe is validated too.

    Raises UserError, one line per problem.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML ({one_line(error)})") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("runs"), list):
        raise UserError(f"{path}: a study is a mapping with a list `runs`")
    variables = _variables(path, tree.pop("variables", None) or {}, given)
    tree = _replaced({key: value for key, value in tree.items() if not key.startswith("x-")}, variables, path)
    shared_set, shared_convert = tree.pop("set", None) or {}, tree.pop("convert", None) or {}
    for run in tree["runs"]:
        if isinstance(run, dict):
            run["convert"] = {**shared_convert, **(run.get("convert") or {})}
            run["set"] = {**(shared_set if run.get("recipe") else {}), **(run.get("set") or {})}
    try:
        study = Study.model_validate(tree)
    except ValidationError as error:
        raise UserError(
            "\n".join(
                f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
                for problem in error.errors(include_url=False)
            )
        ) from None
    for run in study.runs:
        try:
            study.tokens(run)
        except UserError as error:
            raise UserError(f"{path}: run {run.name}: {error}") from None
    return study


def _variables(path: Path, declared: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    values = dict(declared)
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or name not in declared:
            raise UserError(f"{entry}: expected NAME=VALUE with NAME one of {', '.join(declared) or 'none'} ({path})")
        values[name] = value
    if missing := [name for name, value in values.items() if value is None]:
        raise UserError(f"{path}: give a value to {', '.join(f'{name}=...' for name in missing)}")
    return values


def _replaced(value: Any, variables: Mapping[str, Any], path: Path) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, variables, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, variables, path) for item in value]
    if not isinstance(value, str):
        return value
    for name in VARIABLE.findall(value):
        if name not in variables:
            raise UserError(f"{path}: ${{{name}}} is not among the file's `variables`")
    return VARIABLE.sub(lambda match: str(variables[match[1]]), value)
