"""Running text in which facts are hidden."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.probes import Span

_ENDS = (".", "!", "?", '"', "\n")


class Haystack:
    """A text, cut into random pieces and opened at ends of sentences.

    Args:
        ids: token ids [n] of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> None:
        self.ids = ids
        known, places = np.unique(ids, return_inverse=True)
        ends = [str(tokenizer.decode([int(token)])).rstrip(" ").endswith(_ENDS) for token in known]
        self._ends = np.asarray(ends, dtype=bool)[places]

    def piece(self, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """A random piece of `length` tokens, and the places in it that follow the end of a sentence.

        Raises UserError if the text is shorter.
        """
        if not 0 < length <= self.ids.size:
            raise UserError(f"recall probes need a text of {length} tokens, the text has {self.ids.size}")
        start = rng.randrange(self.ids.size - length + 1)
        places = np.flatnonzero(self._ends[start : start + length]) + 1
        return self.ids[start : start + length].tolist(), places.tolist()

    def with_facts(
        self,
        rng: random.Random,
        prefix: Sequence[int],
        facts: Sequence[Sequence[int]],
        length: int,
        between_sentences: bool = True,
    ) -> tuple[list[int], list[Span]]:
        """`prefix`, then a piece with the facts at random places, `length` tokens together.

        Args:
            between_sentences: whether facts stand between sentences only, if the piece has enough of them.

        Returns the token ids and the span of each fact, in the order of `facts`, which is their order in the text.
        Raises UserError if the text is too short, or `length` leaves fewer tokens of text than there are facts.
        """
        room = length - len(prefix) - sum(map(len, facts))
        if room < len(facts):
            raise UserError(f"{len(facts)} facts of {sum(map(len, facts))} tokens do not fit into {length} tokens")
        text, places = self.piece(rng, room)
        if not between_sentences or len(places) < len(facts):
            places = list(range(1, room + 1))
        places = sorted(rng.sample(places, len(facts)))
        ids, spans, begin = list(prefix), [], 0
        for place, fact in zip(places, facts, strict=True):
            ids += text[begin:place]
            spans.append((len(ids), len(ids) + len(fact)))
            ids += fact
            begin = place
        return ids + text[begin:], spans
