"""Reads and checks a study: a list of runs, each a recipe with overrides and options of the conversion."""

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
    """Options of `deltanet-hf convert`."""

    layers: str = Field("all", description="--layers: which layers keep softmax attention; all: none keeps it.")
    mixer: str = Field("gated_deltanet", description="--mixer: the kind of layer that replaces attention.")
    profile: str = Field("faithful", description="--profile: the settings of the mixer to start from.")
    training: bool = Field(True, description="false: --no-training, for a model that will not be distilled.")
    set: dict[str, bool | int | str] = Field({}, description="--set: single settings of the mixer, by name.")
    fit_memory: bool = Field(True, description="false: --no-fit-memory.")
    text: str | None = Field(
        None, description="--text: the calibration text. Default: the text that is installed with the package."
    )
    calibration_tokens: int | None = Field(None, gt=0, description="--calibration-tokens.")
    seed: int = Field(0, ge=0, description="--seed: selects the calibration sample.")

    @field_validator("text")
    @classmethod
    def _empty_is_none(cls, text: str | None) -> str | None:
        return text or None

    def arguments(self) -> list[str]:
        """The arguments of `deltanet-hf convert` after TEACHER and OUT."""
        arguments = ["--layers", self.layers, "--mixer", self.mixer, "--profile", self.profile]
        arguments += [] if self.training else ["--no-training"]
        for key, value in self.set.items():
            arguments += ["--set", f"{key}={json.dumps(value) if isinstance(value, bool) else value}"]
        arguments += [] if self.fit_memory else ["--no-fit-memory"]
        arguments += ["--text", self.text] if self.text else []
        arguments += ["--calibration-tokens", str(self.calibration_tokens)] if self.calibration_tokens else []
        return arguments + (["--seed", str(self.seed)] if self.seed else [])


class Run(Strict):
    """A run makes one row of the results: a model that is trained and measured, or only measured."""

    name: str = Field(..., description="Name of the row and of the run's folder.")
    recipe: str | None = Field(None, description="Recipe of the run: a YAML file or the name of a shipped recipe.")
    untrained: Literal["teacher", "start"] | None = Field(
        None,
        description="Measure without training, instead of a recipe. teacher: the teacher. start: the converted model.",
    )
    set: dict[str, Any] = Field({}, description="Overrides of the recipe, such as `stages.distil.train: lora`.")
    convert: Conversion = Field(default_factory=Conversion, description="Options of the conversion, see below.")
    keep: bool = Field(False, description="Keep the trained model. Otherwise only its log and its figures are kept.")

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
    """A list of runs and the settings that they share."""

    teacher: str = Field(..., description="Folder of the softmax model.")
    arrays: str = Field(..., description="Folder of the token arrays for evaluation (see measuring.study.mixer_row).")
    output: str = Field(..., description="Folder of runs, conversions and logs.")
    results: str = Field(..., description="JSON file to which the rows are added.")
    runs: tuple[Run, ...] = Field(
        ..., min_length=1, description="The runs, in the order of the results table; see below."
    )

    @field_validator("runs")
    @classmethod
    def _names_differ(cls, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        names = [run.name for run in runs]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two runs are called {repeated[0]!r}")
        return runs

    def recipe(self, run: Run, student: str) -> tuple[list[str], Recipe]:
        """The overrides of a run's recipe as command-line arguments, and the recipe with them.

        The files that the recipe names need not exist.
        """
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
        """Number of training tokens of a run, which stands for its cost."""
        return 0 if run.recipe is None else sum(map(stage_tokens, self.recipe(run, "-")[1].stages))


def load_study(path: Path, given: Sequence[str] = ()) -> Study:
    """Read and validate a study with the recipes of all its runs.

    The file's `variables` have a value or null. Entries of `given` ("NAME=VALUE") set them; those that are null have
    no default. `${NAME}` is replaced in every string. `set` and `convert` at the top of the file are defaults for every
    run. Keys that begin with `x-` hold YAML anchors and are ignored.

    Raises UserError with one line per problem.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # beside YAML's own errors, those of its dates and numbers, and of deep nesting
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
