"""The report as Markdown: one table per group of measurements, each score with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Model = dict[str, Any]
Column = tuple[str, Callable[[Model], str]]
_BASELINE_NOTE = (
    "Baselines are not trained: `window` is the teacher whose softmax layers see only the last and first tokens, "
    "`untrained windows` the same with windows whose cache has the bytes and bits of a student, `kept layers ... "
    "untrained windows` the teacher that keeps the student's softmax layers and has windows of the rest of the bytes "
    "in the others, `..., untrained` a student with the teacher's weights, and `linear layers off` a student "
    "whose converted layers output zero."
)
_RELATIVE_NOTE = (
    "MB of the cache of one sequence of 2,048 tokens, and recall in percent of the teacher's: (model - control) / "
    "(teacher - control). The control is the teacher on the same questions with the facts taken out. Probes of which "
    "the teacher answers less than 20% are left out."
)


def markdown(document: dict[str, Any]) -> str:
    """The text of report.md from a report's JSON document."""
    models, settings = document["models"], document["settings"]
    parts = ["# Evaluation report", "", _conditions(settings), ""]
    if any(model["kind"] == "baseline" for model in models):
        parts += [_BASELINE_NOTE, ""]
    tasks = settings["tasks"]
    if tasks:
        columns = [_percent(), *(_task(name, task["metric"]) for name, task in tasks.items())]
        parts += ["## Tasks", "", *_table(models, columns), "", _task_notes(settings), ""]
    texts = list(models[0]["texts"])
    if texts:
        parts += ["## Perplexity", "", *_table(models, [_text(text, "perplexity", 2) for text in texts]), ""]
        divergences = [_text(text, "kl", 4) for text in texts]
        parts += ["## KL(teacher || model), nats per token", "", *_table(models[1:], divergences), ""]
        agreements = [_text(text, "agreement", 2, 100) for text in texts]
        parts += ["## Same most likely token as the teacher, percent", "", *_table(models[1:], agreements), ""]
    recall = list(models[0]["recall"])
    if recall:
        parts += ["## Recall", "", *_table(models, [_recall(name) for name in recall]), ""]
        parts += ["Percent of correct answers; `repeat` is the perplexity of the second copy of 256 tokens.", ""]
        relative = [_relative(name) for name in recall if name in models[0]["recall_of_teacher"]]
        parts += ["## Recall for its bytes", "", *_table(models, [_megabytes(), *relative]), "", _RELATIVE_NOTE, ""]
    speed = [column for index, point in enumerate(models[0]["speed"]) for column in _speed(index, point["length"])]
    if speed:
        parts += ["## Memory and speed, batch size 1", "", *_table(models, speed), ""]
    return "\n".join(parts)


def _conditions(settings: dict[str, Any]) -> str:
    limit = f", at most {settings['limit']} rows per measurement (a trial, not a result)" if settings["limit"] else ""
    return (
        f"Suite `{settings['suite']}`{limit}. {settings['device']}, dtype {settings['dtype']}, "
        f"torch {settings['torch']}, transformers {settings['transformers']}, seed {settings['seed']}. "
        "± is one standard error."
    )


def _task_notes(settings: dict[str, Any]) -> str:
    rows = ", ".join(f"{name} {count}" for name, count in settings["rows"].items())
    metrics = ", ".join(f"{n} {t['metric']} (chance {100 * t['chance']:.0f})" for n, t in settings["tasks"].items())
    missing = f" No data for: {', '.join(settings['without_data'])}." if settings["without_data"] else ""
    return (
        "`% of teacher` is the mean over tasks of (model - chance) / (teacher - chance); its error follows from paired "
        "items. Generation tasks and tasks in which the teacher is at chance are not part of it. "
        f"Metrics in percent: {metrics}. Rows scored: {rows}.{missing}"
    )


def _table(models: list[Model], columns: Sequence[Column]) -> list[str]:
    lines = ["| model | " + " | ".join(title for title, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for model in models:
        name = f"**{model['name']}**" if model["kind"] == "student" else model["name"]
        lines.append(f"| {name} | " + " | ".join(cell(model) for _, cell in columns) + " |")
    return lines


def _plain(score: dict[str, float] | None, digits: int, scale: float = 1.0) -> str:
    if score is None:
        return "-"
    if score["stderr"] is None:
        return f"{scale * score['value']:.{digits}f} (one item)"
    return f"{scale * score['value']:.{digits}f} ± {scale * score['stderr']:.{digits}f}"


def _percent() -> Column:
    return "% of teacher", lambda model: _plain(model["percent_of_teacher"], 1)


def _task(name: str, metric: str) -> Column:
    return name, lambda model: _plain(model["tasks"][name].get(metric), 1, 100)


def _text(name: str, key: str, digits: int, scale: float = 1.0) -> Column:
    return name, lambda model: _plain(model["texts"][name].get(key), digits, scale)


def _recall(name: str) -> Column:
    digits, scale = (2, 1) if name == "repeat_perplexity" else (1, 100)
    return _title(name), lambda model: _plain(model["recall"][name], digits, scale)


def _relative(name: str) -> Column:
    return _title(name), lambda model: _plain(model["recall_of_teacher"].get(name), 1, 100)


def _megabytes() -> Column:
    return "MB", lambda model: f"{model['bytes'] / 1e6:.1f}"


def _title(name: str) -> str:
    """The heading of a recall measure."""
    kind, _, size = name.rpartition("_")
    return {
        "repeat": "repeat",
        "mqar": f"MQAR, {size} pairs",
        "needle": f"4 needles in {size}",
        "prose": f"facts in {size} tokens of prose",
    }[kind]


def _speed(index: int, length: int) -> list[Column]:
    def cell(key: str, scale: float, digits: int) -> Callable[[Model], str]:
        return lambda model: f"{model['speed'][index][key] / scale:.{digits}f}"

    return [
        (f"cache MB at {length}", cell("cache_bytes", 1e6, 2)),
        (f"decode tokens/s at {length}", cell("decode_tokens_per_second", 1, 0)),
        (f"prefill tokens/s at {length}", cell("prefill_tokens_per_second", 1, 0)),
    ]
