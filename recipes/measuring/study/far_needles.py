"""Needles in texts of any length, as in RULER (Hsieh et al., 2024): one number in filler or in a novel, or one of four.

Texts, questions and answers are token ids of equal length, so that a model reads all probes of a kind in one shape. The
answer counts if greedy decoding gives all digits (`answer_outcomes`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.recall_tasks import ITEMS
from deltanet_hf.evaluation.tasks.suites import SEED

FILLER = "The river runs to the sea. The road goes over the hill. Some people wait for the bus, and others walk home. "


@dataclass(frozen=True)
class FarNeedles:
    """The probes of a kind.

    Attributes:
        in_novel: whether the numbers stand in a novel, and not in repeated filler.
        numbers: in the text, each under a word of its own; one is asked for.
    """

    in_novel: bool
    numbers: int

    def probes(self, tokenizer: PreTrainedTokenizerBase, novels: np.ndarray, length: int, count: int) -> list[Probe]:
        """`count` probes of `length` tokens, question and answer included.

        Args:
            novels: token ids [n] of running text.

        Raises UserError if the text is too short.
        """

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        filler = encode(FILLER)
        text = novels if self.in_novel else np.asarray(filler * (length // len(filler) + 2))
        haystack, rng = Haystack(tokenizer, text), random.Random(f"{SEED} {self} {length}")
        made = []
        for _ in range(count):
            words = rng.sample(ITEMS, self.numbers)
            numbers = [f" {rng.randrange(10**6, 10**7)}" for _ in words]
            facts = [encode(f"\nThe special number of the {w} is{n}.\n") for w, n in zip(words, numbers, strict=True)]
            asked = rng.randrange(self.numbers)
            question = encode(f"\nWhat is the special number of the {words[asked]}? The special number of the")
            question += encode(f" {words[asked]} is")
            answer = encode(numbers[asked])
            room = length - len(question) - len(answer)
            ids, told = haystack.with_facts(rng, prefix_ids(tokenizer), facts, room)
            ids = [*ids, *question, *answer]
            made.append(Probe(tuple(ids), ((length - len(answer), length),), tuple(told)))
        return made


KINDS = {"single_1": FarNeedles(False, 1), "single_2": FarNeedles(True, 1), "multikey_1": FarNeedles(True, 4)}
"""By the names of RULER's tasks that they resemble."""
