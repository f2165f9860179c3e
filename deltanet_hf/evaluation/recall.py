"""Recall tasks that need no data set: associative recall and needles in a haystack.

Both are scored by teacher forcing: an answer counts when greedy decoding would have produced it, given the right
answers to the questions before it. Inputs depend on the tokenizer, the text and the seed only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.scores import Score, clustered_score
from deltanet_hf.evaluation.scoring import token_budget

_ITEMS = (
    *("amber", "anchor", "arrow", "basket", "beacon", "bridge", "button", "candle", "carpet", "castle", "cellar"),
    *("clover", "copper", "cradle", "curtain", "dagger", "falcon", "feather", "fiddle", "garden", "goblet", "hammer"),
    *("harbor", "helmet", "island", "jacket", "kettle", "ladder", "lantern", "marble", "meadow", "mirror"),
)


@dataclass(frozen=True)
class Probe:
    """Token ids [T] and, per question, the span [begin, end) of its answer's tokens."""

    ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


@torch.inference_mode()
def score_probes(model: PreTrainedModel, probes: Sequence[Probe]) -> Score:
    """Share of answers that greedy decoding gives in full; the error is over probes."""
    right: list[float] = []
    owners: list[int] = []
    rows = max(1, token_budget(model) // max(len(probe.ids) for probe in probes))
    for start in range(0, len(probes), rows):
        batch = probes[start : start + rows]
        length = max(len(probe.ids) for probe in batch)
        begin = min(first for probe in batch for first, _ in probe.answers)
        ids = torch.tensor([(*probe.ids, *[0] * (length - len(probe.ids))) for probe in batch], device=model.device)
        # The logits of position begin - 1 predict the first token asked for.
        logits = model(ids, use_cache=False, logits_to_keep=length - begin + 1).logits
        greedy = logits.argmax(-1).cpu().numpy()
        for row, probe in enumerate(batch):
            wanted = np.asarray(probe.ids)
            for first, end in probe.answers:
                right.append(float((greedy[row, first - begin : end - begin] == wanted[first:end]).all()))
                owners.append(start + row)
    return clustered_score(right, owners)


def associative_recall(
    tokenizer: PreTrainedTokenizerBase, pairs: int, count: int = 32, seed: int = 1234
) -> list[Probe]:
    """Multi-query associative recall (Arora et al., Zoology, 2023) in the tokenizer's own words.

    A probe lists `pairs` lines "key value" of single-token words, then all keys again in another order; each value
    of the second list is asked for. No word occurs twice in the first list.
    """
    words = _single_token_words(tokenizer)
    if len(words) < 2 * pairs:
        raise UserError(f"associative recall: {pairs} pairs need {2 * pairs} single-token words, {len(words)} found")
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    rng = random.Random(f"{seed} {pairs}")
    probes = []
    for _ in range(count):
        drawn = rng.sample(words, 2 * pairs)
        facts = list(zip(drawn[:pairs], drawn[pairs:], strict=True))
        ids = prefix_ids(tokenizer)
        for key, value in facts:
            ids += [key, value, *newline]
        answers = []
        for key, value in rng.sample(facts, pairs):
            answers.append((len(ids) + 1, len(ids) + 2))
            ids += [key, value, *newline]
        probes.append(Probe(tuple(ids), tuple(answers)))
    return probes


def _single_token_words(tokenizer: PreTrainedTokenizerBase, wanted: int = 1000) -> list[int]:
    """Ids of the first whole lower-case words of the vocabulary (with their leading space), most frequent first.

    Byte-pair vocabularies list merges by frequency, so small ids are common words.
    """
    ids = []
    for token_id, text in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if text is None:  # a vocabulary with gaps
            continue
        word = text[1:]
        # How byte-level and SentencePiece vocabularies write a leading space.
        if text[:1] in ("Ġ", "▁") and len(word) >= 3 and word.isascii() and word.isalpha() and word.islower():
            ids.append(token_id)
            if len(ids) == wanted:
                break
    return ids


def needles(
    tokenizer: PreTrainedTokenizerBase,
    haystack: np.ndarray,
    length: int,
    count: int = 16,
    needles_each: int = 4,
    seed: int = 1234,
) -> list[Probe]:
    """Needles in a haystack: `needles_each` facts at random depths of a text, each asked for at the end.

    Args:
        haystack: token ids [n] of a text; each probe starts elsewhere in it.
        length: tokens of a probe, questions included.
    """
    rng = random.Random(f"{seed} {length}")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    probes = []
    for _ in range(count):
        names = rng.sample(_ITEMS, needles_each)
        codes = [f" {rng.randrange(10**5, 10**6)}" for _ in names]
        facts = [encode(f"\nThe secret code of the {n} is{c}.\n") for n, c in zip(names, codes, strict=True)]
        questions = [encode(f"\nThe secret code of the {name} is") for name in names]
        replies = [encode(code) for code in codes]
        tail = sum(len(q) + len(r) for q, r in zip(questions, replies, strict=True))
        room = length - tail - sum(map(len, facts)) - 1
        if room < needles_each or room > haystack.size:
            raise UserError(
                f"needles at {length} tokens need a haystack of {room} tokens, the text has {haystack.size}"
            )
        start = rng.randrange(haystack.size - room + 1)
        hay = haystack[start : start + room].tolist()
        ids = prefix_ids(tokenizer)
        depths = sorted(rng.sample(range(room), needles_each))
        ids += hay[: depths[0]]
        for begin, end, fact in zip(depths, [*depths[1:], room], facts, strict=True):
            ids += fact + hay[begin:end]
        order = rng.sample(range(needles_each), needles_each)
        answers = []
        for i in order:
            ids += questions[i]
            answers.append((len(ids), len(ids) + len(replies[i])))
            ids += replies[i]
        probes.append(Probe(tuple(ids), tuple(answers)))
    return probes
