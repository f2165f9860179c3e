"""Multiple-choice questions with lettered options, once per rotation of the options; used by yaml/rotated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from datasets import Dataset

Row = dict[str, Any]


def rotations(question: str, options: Sequence[str], gold: int, group: int) -> list[Row]:
    """One row per rotation of the options; `gold` in a row is the index of the correct option in that rotation.

    Args:
        gold: index of the correct option.
        group: number of the question, which its rows share.
    """
    count = len(options)
    return [
        {
            "group": group,
            "question": question,
            "options": [options[(i + shift) % count] for i in range(count)],
            "gold": (gold - shift) % count,
        }
        for shift in range(count)
    ]


def _rotated(questions: Iterable[tuple[str, Sequence[str], int]]) -> Dataset:
    rows = [row for group, item in enumerate(questions) for row in rotations(*item, group)]
    return Dataset.from_list(rows)


def arc(dataset: Dataset) -> Dataset:
    """ARC rows (question, choices, answerKey), once per rotation."""
    return _rotated(
        (row["question"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"])) for row in dataset
    )


def openbookqa(dataset: Dataset) -> Dataset:
    """OpenBookQA rows (question_stem, choices, answerKey), once per rotation."""
    return _rotated(
        (row["question_stem"], row["choices"]["text"], row["choices"]["label"].index(row["answerKey"].strip()))
        for row in dataset
    )


def sciq(dataset: Dataset) -> Dataset:
    """SciQ rows (without the support text), once per rotation."""
    return _rotated(
        (row["question"], [row["distractor1"], row["distractor2"], row["distractor3"], row["correct_answer"]], 3)
        for row in dataset
    )


def prompt(doc: Row) -> str:
    """The prompt: the question, one line per lettered option, and "Answer:"."""
    lines = [f"{letter}. {option}" for letter, option in zip(letters(doc), doc["options"], strict=True)]
    return "\n".join([f"Question: {doc['question']}", *lines, "Answer:"])


def letters(doc: Row) -> list[str]:
    """The letters A, B, C ... of the question's options."""
    return [chr(ord("A") + i) for i in range(len(doc["options"]))]


def process_results(doc: Row, results: list[tuple[float, bool]]) -> Row:
    """The `process_results` function for lm-eval: metrics of a row from (log-probability, greedy) per letter."""
    scores = [log_prob for log_prob, _ in results]
    right = float(scores.index(max(scores)) == doc["gold"])
    return {"acc": right, "all_rotations": (doc["group"], right)}


def right_in_all(items: Iterable[tuple[int, float]]) -> list[float]:
    """Per question, 1.0 if it was answered correctly in all its rotations.

    Args:
        items: (number of the question, 1.0 if this rotation was answered correctly) per row.
    """
    groups: dict[int, float] = {}
    for group, right in items:
        groups[group] = min(groups.get(group, 1.0), right)
    return list(groups.values())


def all_right(items: list[tuple[int, float]]) -> float:
    """The `aggregation` function for lm-eval: the share of questions in `right_in_all`."""
    rights = right_in_all(items)
    return sum(rights) / len(rights)
