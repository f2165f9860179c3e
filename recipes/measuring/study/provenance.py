"""The commands that made a model and measured it, for the row: from the records in its folder and the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from deltanet_convert.calibration_text import SHIPPED_TEXT
from deltanet_convert.options import ConvertOptions, keep_of_layers
from deltanet_hf.errors import UserError
from deltanet_hf.models.layers import SOFTMAX
from deltanet_recipes.config import read_recipe
from deltanet_recipes.shipped import shipped_recipes

DEFAULT = ConvertOptions()
SINGLE = ("profile", "calibration_tokens", "context", "positions", "dtype", "seed")
"""Options of `convert` that are left out where they have their defaults."""
STUDENT, RUN = "student", "run"  # the folders in the commands
OWN = ("student", "teacher", "output", "log", "engine")  # keys of a recipe that decide nothing about the model


def commands(folder: Path, module: str, words: Sequence[str]) -> str:
    """How the model in `folder` was made, as far as its records say, and measured, joined by `&&`.

    Args:
        module: that measures, for `python -m`.
        words: its arguments; FOLDER in them stands for the model's folder.
    """
    made, place = [], folder.name
    if (converted := _read(folder / "conversion.json")) and "options" in converted:
        made.append(shlex.join(conversion(converted)))
        place = STUDENT
        if recipe := _read(folder / "recipe.json"):
            made.append(shlex.join(["deltanet-hf", "distill", *map(_shown, training(recipe))]))
            place = f"{RUN}/final"
    measured = [_shown(word.replace("FOLDER", place)) for word in words]
    return " && ".join([*made, shlex.join(["python", "-m", module, *measured])])


def flags(**options: Any) -> list[str]:
    """The words of options of a command; those that are None or False are left out."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def conversion(report: dict[str, Any]) -> list[str]:
    """The `deltanet-hf convert` of a conversion.json.

    What the defaults of `convert` decide, which may change, is written out: what is kept, mixer and bits of the cache.
    """
    options = report["options"]
    words = ["deltanet-hf", "convert", report["teacher"]["name"], STUDENT]
    words += flags(keep=_keep(report), mixer=options["mixer"])
    for key, value in options["set"].items():
        words += ["--set", f"{key}={_value(value)}"]
    text = report["text"]["source"]
    words += flags(
        cache_bits=options.get("cache_bits", 16),
        text=_shown(text) if text != SHIPPED_TEXT else None,
        no_training=not options["training"],
    )
    single = {name: options.get(name, getattr(DEFAULT, name)) for name in SINGLE}
    return words + flags(**{name: value for name, value in single.items() if value != getattr(DEFAULT, name)})


def _keep(report: dict[str, Any]) -> str:
    """`--keep`; in the place of a search for layers, what it found."""
    options, found = report["options"], report.get("selection") or {}
    keep = options["keep"] if "keep" in options else keep_of_layers(options["layers"])
    automatic = ConvertOptions(keep=keep).automatic
    if not automatic or found.get("unit") == "kv_head" or "planned_windows" in found:
        return _shown(keep)
    kept = [str(index) for index, kind in enumerate(options["deltanet"]["layers"]) if kind == SOFTMAX]
    return f"layers:{','.join(kept)}" if kept else "none"


def training(recipe: dict[str, Any]) -> list[str]:
    """The arguments of `deltanet-hf distill` for the recipe of a recipe.json: the shipped recipe with the shortest
    changes, and these; recipe.json itself, which is a recipe too, where none can be changed so.
    """
    own, wanted = [f"student={STUDENT}", f"output={RUN}"], _decisive(recipe)
    found = []
    for name in shipped_recipes():
        changes = list(_changes(_decisive(read_recipe(name, own).model_dump(mode="json")), wanted))
        try:
            remade = _decisive(read_recipe(name, [*own, *changes]).model_dump(mode="json"))
        except UserError:
            continue
        if remade == wanted and list(remade["stages"]) == list(wanted["stages"]):
            found.append([name, *own, *changes])
    return min(found, key=lambda words: len(" ".join(words)), default=["recipe.json", *own])


def _decisive(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe on which the trained model depends, the stages by their names."""
    data = {key: value for key, value in recipe["data"].items() if key != "cache"}
    stages = {stage.get("name") or stage["kind"]: stage for stage in recipe["stages"]}
    return {key: value for key, value in recipe.items() if key not in OWN} | {"data": data, "stages": stages}


def _changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Overrides that make one recipe to another, as far as there are any."""
    yield from (f"stages.{name}=null" for name in before["stages"] if name not in after["stages"])
    for key in before:
        kept = before[key] if key != "stages" else {k: v for k, v in before[key].items() if k in after[key]}
        yield from _differences(key, kept, after.get(key))


def _differences(key: str, before: Any, after: Any) -> Iterator[str]:
    """Overrides `dotted.key=value` that make `before` to `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from _differences(f"{key}.{name}", before.get(name), after.get(name))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{key}.{place}", old, new)
    elif before != after:
        yield f"{key}={_value(after)}"


def _value(value: Any) -> str:
    """A value as YAML in one line."""
    return value if isinstance(value, str) and yaml.safe_load(value) == value else json.dumps(value)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _shown(word: str) -> str:
    """A word of a command line without the folders of this machine: an absolute path is its name."""
    name, equals, path = word.rpartition("=")
    return f"{name}{equals}{Path(path).name if Path(path).is_absolute() else path}"
