"""Recall probes of several formats: facts scattered over a text, and a question about each at its end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltanet_hf.data import prefix_ids, shipped_texts
from deltanet_hf.errors import UserError

from .probe_text import FORMATS, Format

MOST_FACTS = 6
CHARACTERS = 60_000  # of each text


@dataclass(frozen=True)
class SelectionProbe:
    """A text with questions.

    Attributes:
        format: name of its format.
        ids: token ids [T]; all probes of a set have the same T.
        answers: span [begin, end) of the tokens of each answer.
    """

    format: str
    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


def haystack(tokenizer: Any) -> np.ndarray:
    """Token ids [n] int64 of the beginnings of the texts that ship with deltanet-hf."""
    text = "\n\n".join(path.read_text(encoding="utf-8")[:CHARACTERS] for path in shipped_texts())
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def selection_probes(
    tokenizer: Any,
    text: np.ndarray,
    length: int,
    count: int,
    window: int,
    seed: int,
    formats: Sequence[Format] = FORMATS,
) -> list[SelectionProbe]:
    """`count` probes of each format, all of `length` tokens.

    A probe holds up to 6 facts. All of them lie further than `window` tokens before the questions, unless the text is
    too short for that.

    Args:
        text: token ids [n] to draw the running text from.

    Raises:
        UserError: a probe of one fact does not fit into `length` tokens, or the text has fewer tokens.
    """
    return [
        _probe(tokenizer, text, length, window, kind, random.Random(f"{seed} {length} {kind.name} {number}"))
        for kind in formats
        for number in range(count)
    ]


def _probe(
    tokenizer: Any, text: np.ndarray, length: int, window: int, kind: Format, rng: random.Random
) -> SelectionProbe:
    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"]) if part else []

    prefix, heading = prefix_ids(tokenizer), encode(kind.heading)
    keys = kind.keys(rng, MOST_FACTS)
    values = [encode(kind.value(rng)) for _ in keys]
    end, end_of_answer = encode(kind.end), encode(kind.end_of_answer)
    facts = [encode(kind.statement.format(key)) + value + end for key, value in zip(keys, values, strict=True)]
    questions = [encode(kind.question.format(key)) for key in keys]
    number = len(keys)
    while number and (
        room := length - len(prefix) - _length(facts, questions, values, heading, end_of_answer, number)
    ) < (length // 3):
        number -= 1
    if not number:
        raise UserError(f"--length {length}: too short for a probe of the format '{kind.name}'; give a larger length")
    if room > len(text):
        raise UserError(f"--length {length}: the shipped text has {len(text)} tokens, {room} are needed")
    start = rng.randrange(len(text) - room + 1)
    hay = text[start : start + room].tolist()
    latest = max(room - window, room // 2)
    if kind.together:
        depth = rng.randrange(latest)
        ids = [*prefix, *hay[:depth], *heading, *(token for fact in facts[:number] for token in fact), *hay[depth:]]
        ids += heading
    else:
        ids, last = list(prefix), 0
        for fact, depth in zip(facts[:number], sorted(rng.choices(range(latest), k=number)), strict=True):
            ids += hay[last:depth] + fact
            last = depth
        ids += hay[last:]
    answers = []
    for index in rng.sample(range(number), number):
        ids += questions[index]
        answers.append((len(ids), len(ids) + len(values[index])))
        ids += values[index] + end_of_answer
    assert len(ids) == length
    return SelectionProbe(kind.name, tuple(ids), tuple(answers))


def _length(
    facts: list[list[int]],
    questions: list[list[int]],
    values: list[list[int]],
    heading: list[int],
    end_of_answer: list[int],
    number: int,
) -> int:
    """Tokens of everything but the running text, with the first `number` facts."""
    parts = (*facts[:number], *questions[:number], *values[:number])
    return sum(map(len, parts)) + number * len(end_of_answer) + 2 * len(heading)
