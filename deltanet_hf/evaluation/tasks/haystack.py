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

    def with_facts(
        self, rng: random.Random, prefix: Sequence[int], facts: Sequence[Sequence[int]], length: int
    ) -> tuple[list[int], list[Span]]:
        """`prefix`, then a random piece with the facts at random places, `length` tokens together.

        Facts stand between sentences, if the piece has enough of them.

        Returns the token ids and the span of each fact, in the order of `facts`, which is their order in the text.
        Raises UserError if the text is too short, or `length` leaves fewer tokens of text than there are facts.
        """
        room = length - len(prefix) - sum(map(len, facts))
        if room < len(facts):
            raise UserError(f"{len(facts)} facts of {sum(map(len, facts))} tokens do not fit into {length} tokens")
        if room > self.ids.size:
            raise UserError(f"recall probes need a text of {room} tokens, the text has {self.ids.size}")
        start = rng.randrange(self.ids.size - room + 1)
        text = self.ids[start : start + room].tolist()
        places = (np.flatnonzero(self._ends[start : start + room]) + 1).tolist()
        if len(places) < len(facts):
            places = list(range(1, room + 1))
        places = sorted(rng.sample(places, len(facts)))
        ids, spans, begin = list(prefix), [], 0
        for place, fact in zip(places, facts, strict=True):
            ids += text[begin:place]
            spans.append((len(ids), len(ids) + len(fact)))
            ids += fact
            begin = place
        return ids + text[begin:], spans
