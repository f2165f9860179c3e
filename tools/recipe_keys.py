"""Prints the keys of recipes and studies as Markdown tables: `python tools/recipe_keys.py`."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deltanet_recipes.schema import Align, Distil, DistilBase, Long, Recipe, StageBase
from deltanet_recipes.schema_sections import (
    Data,
    Engine,
    EvaluationArray,
    Log,
    Optimizer,
    Recall,
    Source,
    WindowDropout,
)
from measuring.study.study_config import Conversion, Run, Study

SECTIONS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "the recipe": (Recipe, None),
    "data": (Data, None),
    "data.sources": (Source, None),
    "evaluation (of a source)": (EvaluationArray, None),
    "recall (of a source)": (Recall, None),
    "every stage": (StageBase, None),
    "window_dropout (of a stage)": (WindowDropout, None),
    "optimizer (of a stage)": (Optimizer, None),
    "kind: align": (Align, StageBase),
    "kind: distil": (DistilBase, StageBase),
    "kind: long (as distil, other defaults)": (Long, DistilBase),
    "engine": (Engine, None),
    "log": (Log, None),
    "a study": (Study, None),
    "runs (of a study)": (Run, None),
    "convert (of a run)": (Conversion, None),
}


def markdown() -> str:
    """One table per section with key, default and meaning. Inherited keys are listed where they are defined."""
    assert issubclass(Distil, DistilBase)
    blocks = []
    for title, (model, parent) in SECTIONS.items():
        known = {} if parent is None else parent.model_fields
        lines = [f"**{title}**", "", "| key | default | meaning |", "|---|---|---|"]
        for name, field in model.model_fields.items():
            same = name in known and known[name].get_default(call_default_factory=True) == field.get_default(
                call_default_factory=True
            )
            if name == "kind" or same:
                continue
            meaning = (field.description or f"See {name} below.").replace("|", "\\|")
            lines.append(f"| `{field.alias or name}` | {_default(field)} | {meaning}{_choices(field.annotation)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None or value in ((), {}):
        return "-"
    if isinstance(value, BaseModel):
        changed = ", ".join(f"{key}: {number}" for key, number in value.model_dump(exclude_defaults=True).items())
        return changed or "all defaults"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _choices(annotation: Any) -> str:
    """The values of a Literal, in parentheses."""
    values = [value for value in get_args(annotation) if isinstance(value, str)]
    return f" ({', '.join(values)})" if values else ""


if __name__ == "__main__":
    print(markdown())
