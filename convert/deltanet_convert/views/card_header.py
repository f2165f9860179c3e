"""The metadata at the top of a model card, from which the hub shows licence, base model and figures."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LICENCE_KEYS = ("license", "license_name", "license_link")
MAX_CHARACTERS = 100_000  # that are read of another model's card
FRONT = re.compile(r"---\n(.*?)\n---", re.DOTALL)


@dataclass(frozen=True)
class Metric:
    """A figure of the model: its type for the hub, such as `perplexity`, its name for readers, and its value."""

    type: str
    name: str
    value: float


def card_header(
    title: str,
    tags: Sequence[str],
    *,
    licence: Mapping[str, Any],
    base_model: str | None,
    measured_on: str,
    metrics: Sequence[Metric],
) -> str:
    """The metadata as YAML between two lines `---`.

    Args:
        title: name of the model in the list of figures (`model-index`).
        licence: the entries that `licence_of` found.
        base_model: hub id of the teacher; None for a local one.
        measured_on: the text on which the metrics were measured. Metrics that are not finite are left out.
    """
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", **licence}
    if base_model is not None:
        header["base_model"] = base_model
    header["tags"] = list(tags)
    listed = [
        {"type": metric.type, "name": metric.name, "value": float(f"{metric.value:.5g}")}
        for metric in metrics
        if math.isfinite(metric.value)
    ]
    if listed:
        result = {
            "task": {"type": "text-generation", "name": "Text generation"},
            "dataset": {"type": "text", "name": measured_on},
            "metrics": listed,
        }
        header["model-index"] = [{"name": title, "results": [result]}]
    return f"---\n{yaml.safe_dump(header, sort_keys=False, allow_unicode=True, width=1000)}---"


def licence_of(folder: Path) -> dict[str, Any]:
    """The licence entries of the model card in a folder; none if there is no card, or it cannot be read."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as stream:
        front = FRONT.match(stream.read(MAX_CHARACTERS))
    try:
        found = yaml.safe_load(front[1]) if front else None
    except Exception:  # beside YAML's own errors, those of its dates and numbers, and of deep nesting
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in LICENCE_KEYS if isinstance(found.get(key), str) or _is_names(found.get(key))}


def licence_note(teacher: str, folder: Path) -> str:
    """A paragraph about the licence of the weights, which comes from the teacher.

    Args:
        teacher: name of the teacher.
        folder: folder whose card and licence files say under which terms the teacher is published.
    """
    licence = licence_of(folder)
    names = licence.get("license_name", licence.get("license"))
    texts = [f"`{file.name}`" for pattern in ("LICENSE*", "NOTICE*") for file in sorted(folder.glob(pattern))]
    text = f" Its text: {', '.join(texts)}." if texts else ""
    if names is None and not texts:
        return (
            f"The weights derive from `{teacher}`, whose files name no licence. Find out its terms before you share "
            "this model."
        )
    if names is None:
        return f"The weights derive from `{teacher}`, whose licence applies to this model, too.{text}"
    name = ", ".join(names) if isinstance(names, list) else names
    return f"The weights derive from `{teacher}`, whose licence, `{name}`, applies to this model, too.{text}"


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
