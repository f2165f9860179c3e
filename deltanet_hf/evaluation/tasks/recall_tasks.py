"""Recall probes that need no data set: associative recall and needles in a haystack.

The probes depend on nothing but the tokenizer, the text and the seed.
"""

from __future__ import annotations

import random

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.tasks.suites import SEED

MOST_WORDS = 1000
NEEDLES = 4  # facts per probe
ITEMS = (
    *("amber", "anchor", "arrow", "basket", "beacon", "bridge", "button", "candle", "carpet", "castle", "cellar"),
    *("clover", "copper", "cradle", "curtain", "dagger", "falcon", "feather", "fiddle", "garden", "goblet", "hammer"),
    *("harbor", "helmet", "island", "jacket", "kettle", "ladder", "lantern", "marble", "meadow", "mirror"),
)


def associative_recall(tokenizer: PreTrainedTokenizerBase, pairs: int, count: int = 32) -> list[Probe]:
    """Multi-query associative recall (Arora et al., Zoology, 2023) with words of the tokenizer's vocabulary.

    A probe lists `pairs` lines "key value" of single-token words, then the same lines in another order. The answers
    are the values in the second list. No word occurs twice in the first list.

    Args:
        count: number of probes.

    Raises UserError if the vocabulary has fewer than 2 * `pairs` single-token words.
    """
    words = single_token_words(tokenizer)
    if len(words) < 2 * pairs:
        raise UserError(f"associative recall: {pairs} pairs need {2 * pairs} single-token words, {len(words)} found")
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    rng = random.Random(f"{SEED} {pairs}")
    probes = []
    for _ in range(count):
        drawn = rng.sample(words, 2 * pairs)
        facts = list(zip(drawn[:pairs], drawn[pairs:], strict=True))
        ids = prefix_ids(tokenizer)
        begin = len(ids)
        for key, value in facts:
            ids += [key, value, *newline]
        told = ((begin, len(ids)),)
        answers = []
        for key, value in rng.sample(facts, pairs):
            answers.append((len(ids) + 1, len(ids) + 2))
            ids += [key, value, *newline]
        probes.append(Probe(tuple(ids), tuple(answers), told))
    return probes


def single_token_words(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of at most MOST_WORDS lower-case words that are single tokens with a leading space, smallest ids first.

    Byte-pair vocabularies list merges by frequency, so words with small ids are common.
    """
    ids = []
    for token_id, text in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if text is None:  # the vocabulary has gaps
            continue
        word = text[1:]
        # Byte-level vocabularies write a leading space as Ġ, SentencePiece as ▁.
        if text[:1] in ("Ġ", "▁") and len(word) >= 3 and word.isascii() and word.isalpha() and word.islower():
            ids.append(token_id)
            if len(ids) == MOST_WORDS:
                break
    return ids


def needles(tokenizer: PreTrainedTokenizerBase, haystack: np.ndarray, length: int, count: int = 16) -> list[Probe]:
    """Needles in a haystack: facts at random depths of a text, with one question about each at the end.

    Args:
        haystack: token ids [n] of a text; each probe takes a random part of it.
        length: tokens per probe, including the questions.
        count: number of probes.

    Raises UserError if the haystack is too short.
    """
    rng = random.Random(f"{SEED} {length}")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    probes = []
    for _ in range(count):
        names = rng.sample(ITEMS, NEEDLES)
        codes = [f" {rng.randrange(10**5, 10**6)}" for _ in names]
        facts = [encode(f"\nThe secret code of the {n} is{c}.\n") for n, c in zip(names, codes, strict=True)]
        questions = [encode(f"\nThe secret code of the {name} is") for name in names]
        replies = [encode(code) for code in codes]
        tail = sum(len(q) + len(r) for q, r in zip(questions, replies, strict=True))
        room = length - tail - sum(map(len, facts)) - 1
        if room < NEEDLES or room > haystack.size:
            raise UserError(
                f"needles at {length} tokens need a haystack of {room} tokens, the text has {haystack.size}"
            )
        start = rng.randrange(haystack.size - room + 1)
        hay = haystack[start : start + room].tolist()
        ids = prefix_ids(tokenizer)
        depths = sorted(rng.sample(range(room), NEEDLES))
        ids += hay[: depths[0]]
        told = []
        for begin, end, fact in zip(depths, [*depths[1:], room], facts, strict=True):
            told.append((len(ids), len(ids) + len(fact)))
            ids += fact + hay[begin:end]
        order = rng.sample(range(NEEDLES), NEEDLES)
        answers = []
        for i in order:
            ids += questions[i]
            answers.append((len(ids), len(ids) + len(replies[i])))
            ids += replies[i]
        probes.append(Probe(tuple(ids), tuple(answers), tuple(told)))
    return probes
