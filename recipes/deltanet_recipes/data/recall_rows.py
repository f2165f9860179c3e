"""Synthetic recall rows: facts spread in running text, and questions for them at the end of the row.

A row is made when it is read and depends on the seed and its place in the stream alone, so that nothing but the place
has to be kept to resume. The text comes from the training part of the other sources.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.errors import UserError
from deltanet_recipes.data.packing import Stream
from deltanet_recipes.data.recall_formats import FORMATS, Layout, Words
from deltanet_recipes.schema_sections import Recall, Source

MOST_FACTS = 0.7  # share of a row that facts and questions may take
PASSAGE = (12, 48)  # tokens of a passage that is to be repeated
BLOCK = 0.25  # share of rows in which the facts stand together
OTHER_LAYOUT = 0.4  # share of rows that ask in another notation than that of the facts
REPEAT = "repeat"


@dataclass(frozen=True)
class _Fact:
    """Token ids of a fact, of its question, and of the answer."""

    told: list[int]
    question: list[int]
    answer: list[int]
    close: list[int]  # follows the answer

    @property
    def size(self) -> int:
        return len(self.told) + len(self.question) + len(self.answer) + len(self.close)


class RecallRows:
    """Makes rows.

    Args:
        facts: largest number of facts per 1,024 tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, facts: int) -> None:
        self.tokenizer, self.facts, self.words = tokenizer, facts, Words(tokenizer)

    def make(self, rng: random.Random, name: str, text: list[int], length: int) -> tuple[list[int], list[slice]]:
        """A row of a format.

        Args:
            text: ids of running text, at least `length`.

        Returns:
            `length` ids, and the places of the answers.
        """
        layout = FORMATS[name](rng)
        asked = layout
        if name != REPEAT and rng.random() < OTHER_LAYOUT:
            asked = FORMATS[rng.choice([other for other in FORMATS if other != REPEAT])](rng)
        most = max(1, round(self.facts * length / 1024 / (4 if name == REPEAT else 1)))
        facts = self._facts(rng, layout, asked, rng.randint(1, most), text if name == REPEAT else None)
        newline, head = self._encode(["\n", layout.head])
        taken = len(head) + len(newline) * (most + 1)
        while facts and taken + sum(fact.size for fact in facts) > MOST_FACTS * length:
            facts.pop()
        if not facts:
            return text[:length], []
        block = rng.random() < BLOCK
        lines = 2 if block else len(facts) + 1  # ends of the pieces of text
        room = length - len(head) - lines * len(newline) - sum(fact.size for fact in facts)
        depths = [rng.randrange(room)] * len(facts) if block else sorted(rng.sample(range(room), len(facts)))
        ids = text[: depths[0]] + newline + head
        for fact, begin, end in zip(facts, depths, [*depths[1:], room], strict=True):
            ids += fact.told + (text[begin:end] + newline if end > begin else [])
        answers = []
        for fact in rng.sample(facts, len(facts)):
            ids += fact.question
            answers.append(slice(len(ids), len(ids) + len(fact.answer)))
            ids += fact.answer + fact.close
        return ids, answers

    def _facts(
        self, rng: random.Random, layout: Layout, asked: Layout, count: int, passages: list[int] | None
    ) -> list[_Fact]:
        """Facts with different keys; their values are parts of `passages`, if given."""
        keys = list(dict.fromkeys(self.words.key(rng) for _ in range(count)))
        if passages is None:
            values = [self.words.value(rng) for _ in keys]
            told = self._encode([layout.gap + value for value in values])
            answers = self._encode([asked.gap + value for value in values])
        else:
            sizes = [min(rng.randint(*PASSAGE), len(passages)) for _ in keys]
            begins = [rng.randrange(len(passages) - size + 1) for size in sizes]
            told = answers = [passages[b : b + size] for b, size in zip(begins, sizes, strict=True)]
        openings = self._encode([layout.question(key) for key in keys])
        questions = self._encode([asked.question(key) for key in keys])
        after, close = self._encode([layout.after, asked.after])
        return [
            _Fact(opening + value + after, question, answer, close)
            for opening, value, question, answer in zip(openings, told, questions, answers, strict=True)
        ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]


class RecallStream:
    """An endless stream of recall rows: `read` makes one row as long as what is read.

    Args:
        texts: streams of running text, drawn from by their weights.
        unwanted: ids that are left out of the text (separators, begin-of-text tokens), so that a row is one document.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Stream],
        unwanted: Sequence[int],
        seed: int,
    ) -> None:
        assert source.recall is not None
        self.settings: Recall = source.recall
        self.label, self.weight, self.length = "recall rows", source.weight, math.inf
        self.texts, self.unwanted, self.seed = list(texts), list(unwanted), seed
        self.report: dict[str, Any] = {"source": source.model_dump()}
        self._rows = RecallRows(tokenizer, self.settings.facts)

    def read(self, cursor: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The row [count] int64 at a place of the stream, and that all its tokens are scored [count] bool."""
        rng = random.Random(f"recall {self.seed} {cursor} {count}")
        name = rng.choice(self.settings.formats)
        ids, _ = self._rows.make(rng, name, self._text(rng, count), count)
        return np.array(ids, dtype=np.int64), np.ones(count, dtype=bool)

    def _text(self, rng: random.Random, count: int) -> list[int]:
        """`count` ids of running text from a random place.

        Raises:
            UserError: a text that hardly has any tokens but separators.
        """
        (text,) = rng.choices(self.texts, [text.weight for text in self.texts])
        begin, found = rng.randrange(text.length), np.empty(0, dtype=np.int64)
        for _ in range(100):
            ids, _ = text.read(begin, count)
            found = np.concatenate([found, ids[~np.isin(ids, self.unwanted)]])
            begin += count
            if len(found) >= count:
                return found[:count].tolist()  # type: ignore[no-any-return]
        raise UserError(f"data: {text.label} has too little text between its separators for recall rows")
