"""The keys of recipes as Markdown tables."""

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
)
from measuring.markdown import Column, table

SECTIONS: dict[str, tuple[type[BaseModel], type[BaseModel] | None]] = {
    "the recipe": (Recipe, None),
    "data": (Data, None),
    "data.sources": (Source, None),
    "evaluation (of a source)": (EvaluationArray, None),
    "recall (of a source)": (Recall, None),
    "every stage": (StageBase, None),
    "optimizer (of a stage)": (Optimizer, None),
    "kind: align": (Align, StageBase),
    "kind: distil": (DistilBase, StageBase),
    "kind: long (as distil, other defaults)": (Long, DistilBase),
    "engine": (Engine, None),
    "log": (Log, None),
}


def keys() -> str:
    """One table per section with key, default and meaning. Inherited keys are listed where they are defined."""
    assert issubclass(Distil, DistilBase)
    columns = [
        Column("key", lambda named: f"`{named[1].alias or named[0]}`"),
        Column("default", lambda named: _default(named[1])),
        Column("meaning", lambda named: _meaning(*named)),
    ]
    blocks = []
    for title, (model, parent) in SECTIONS.items():
        known = {} if parent is None else parent.model_fields
        fields = [
            (name, field)
            for name, field in model.model_fields.items()
            if name != "kind" and not (name in known and _default_of(known[name]) == _default_of(field))
        ]
        blocks.append(f"**{title}**\n\n{table(columns, fields)}")
    return "\n\n".join(blocks)


def _default_of(field: Any) -> Any:
    return field.get_default(call_default_factory=True)


def _meaning(name: str, field: Any) -> str:
    return (field.description or f"See {name} below.").replace("|", "\\|") + _choices(field.annotation)


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = _default_of(field)
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
