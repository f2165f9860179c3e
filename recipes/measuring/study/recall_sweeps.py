"""Recall by one variable at a time: the distance of a fact, the number of facts, and facts that were replaced."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.recall_tasks import ITEMS, single_token_words
from deltanet_hf.evaluation.tasks.suites import SEED

LEAD = 64  # tokens of text before the fact of a distance probe
SPREAD = 2048  # tokens over which the pairs of a load probe are spread
ASKED = 16  # pairs that a load probe asks for


def one_fact(tokenizer: PreTrainedTokenizerBase, haystack: Haystack, distance: int, count: int = 64) -> list[Probe]:
    """One fact, `distance` tokens of text, and the question about it.

    Args:
        haystack: the running text.
        count: number of probes.

    Raises UserError if the text is too short.
    """
    rng = random.Random(f"{SEED} distance {distance}")

    def encode(words: str) -> list[int]:
        return list(tokenizer(words, add_special_tokens=False)["input_ids"])

    probes = []
    for _ in range(count):
        name, code = rng.choice(ITEMS), f" {rng.randrange(10**5, 10**6)}"
        piece, _ = haystack.piece(rng, LEAD + distance)
        ids = [*prefix_ids(tokenizer), *piece[:LEAD]]
        fact, reply = encode(f"\nThe secret code of the {name} is{code}.\n"), encode(code)
        told = (len(ids), len(ids) + len(fact))
        ids += fact + piece[LEAD:] + encode(f"\nThe secret code of the {name} is")
        probes.append(Probe((*ids, *reply), ((len(ids), len(ids) + len(reply)),), (told,)))
    return probes


def spread_pairs(tokenizer: PreTrainedTokenizerBase, haystack: Haystack, pairs: int, count: int = 64) -> list[Probe]:
    """Lines "key value" of single-token words, spread over a text of fixed length, and questions about at most 16.

    The length does not depend on the number of pairs, so the distances of the facts do not either.

    Raises UserError if the pairs do not fit, or the vocabulary or the text is too small.
    """
    words, newline = _words(tokenizer, 2 * pairs), _newline(tokenizer)
    rng = random.Random(f"{SEED} load {pairs}")
    probes = []
    for _ in range(count):
        drawn = rng.sample(words, 2 * pairs)
        facts = list(zip(drawn[:pairs], drawn[pairs:], strict=True))
        lines = [[*newline, key, value, *newline] for key, value in facts]
        prefix = prefix_ids(tokenizer)
        ids, told = haystack.with_facts(rng, prefix, lines, SPREAD, between_sentences=False)
        probes.append(_asked(ids, rng.sample(facts, min(pairs, ASKED)), newline, tuple(told)))
    return probes


def replaced_pairs(tokenizer: PreTrainedTokenizerBase, pairs: int, count: int = 64) -> list[Probe]:
    """Two lists of lines "key value" with the same keys and other values, and questions; the second list holds.

    Raises UserError if the vocabulary is too small.
    """
    words, newline = _words(tokenizer, 3 * pairs), _newline(tokenizer)
    rng = random.Random(f"{SEED} replaced {pairs}")
    probes = []
    for _ in range(count):
        drawn = rng.sample(words, 3 * pairs)
        keys, first, second = drawn[:pairs], drawn[pairs : 2 * pairs], drawn[2 * pairs :]
        facts = list(zip(keys, second, strict=True))
        ids = list(prefix_ids(tokenizer))
        begin = len(ids)
        for key, value in (*zip(keys, first, strict=True), *rng.sample(facts, pairs)):
            ids += [key, value, *newline]
        probes.append(_asked(ids, rng.sample(facts, min(pairs, ASKED)), newline, ((begin, len(ids)),)))
    return probes


def _asked(
    ids: list[int], questions: list[tuple[int, int]], newline: list[int], told: tuple[tuple[int, int], ...]
) -> Probe:
    answers = []
    for key, value in questions:
        ids = [*ids, *newline, key, value]
        answers.append((len(ids) - 1, len(ids)))
    return Probe(tuple(ids), tuple(answers), told)


def _words(tokenizer: PreTrainedTokenizerBase, needed: int) -> list[int]:
    words = single_token_words(tokenizer)
    if len(words) < needed:
        raise UserError(f"recall sweeps need {needed} single-token words, the vocabulary has {len(words)}")
    return words


def _newline(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer("\n", add_special_tokens=False)["input_ids"])
