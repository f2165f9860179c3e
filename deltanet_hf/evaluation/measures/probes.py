"""Recall probes: sequences with questions whose answers stand at known positions, and their scores.

Answers are scored under teacher forcing: an answer is exact if greedy decoding gives all of its tokens when the correct
answers to the earlier questions are in the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.continuations import padded, token_budget, token_outcomes

_LOGITS_CUDA = 1 << 31  # elements of the logits of a batch: 4 GiB in bfloat16

Span = tuple[int, int]
"""Positions [begin, end) of tokens in a sequence."""


@dataclass(frozen=True)
class Probe:
    """A sequence of questions with their answers.

    Attributes:
        ids: token ids [T].
        answers: the tokens of each answer.
        facts: the tokens that tell the answers, each span before all answers.
    """

    ids: tuple[int, ...]
    answers: tuple[Span, ...]
    facts: tuple[Span, ...] = ()

    def without_facts(self) -> Probe:
        """The control: the same questions and answers in a sequence from which the facts are taken out."""
        left = list(self.ids)
        for begin, end in sorted(self.facts, reverse=True):
            del left[begin:end]
        taken = len(self.ids) - len(left)
        answers = tuple((begin - taken, end - taken) for begin, end in self.answers)
        return replace(self, ids=tuple(left), answers=answers, facts=())


@dataclass(frozen=True)
class AnswerOutcomes:
    """The outcomes of answers, in the order of the probes and of the answers in each.

    Attributes:
        nats: negative log-probability of all tokens of the answer [N] float64.
        first: whether the first token is the most likely one [N] bool.
        exact: whether all tokens are [N] bool.
        owners: index of the probe [N].
    """

    nats: np.ndarray
    first: np.ndarray
    exact: np.ndarray
    owners: np.ndarray


@torch.inference_mode()
def answer_outcomes(model: PreTrainedModel, probes: Sequence[Probe]) -> AnswerOutcomes:
    """Score every answer of the probes; probes of equal length share forward passes."""
    order = sorted(range(len(probes)), key=lambda index: -len(probes[index].ids))
    found: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    start = 0
    while start < len(order):
        batch = order[start : start + _rows(model, [probes[index] for index in order[start:]])]
        start += len(batch)
        for index, outcome in zip(batch, _batch_outcomes(model, [probes[index] for index in batch]), strict=True):
            found[index] = outcome
    nats, first, exact = (np.concatenate([found[i][part] for i in range(len(probes))]) for part in range(3))
    owners = np.repeat(np.arange(len(probes)), [len(probe.answers) for probe in probes])
    return AnswerOutcomes(nats, first, exact, owners)


def _rows(model: PreTrainedModel, probes: list[Probe]) -> int:
    """Number of probes, the longest first, that fit into a forward pass."""
    longest = len(probes[0].ids)
    rows = max(1, token_budget(model) // longest)
    if model.device.type == "cuda":
        kept = max(longest - min(begin for begin, _ in probe.answers) for probe in probes[:rows])
        rows = max(1, min(rows, _LOGITS_CUDA // (kept * model.config.get_text_config().vocab_size)))
    return rows


def _batch_outcomes(model: PreTrainedModel, probes: list[Probe]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per probe the nats, first and exact of its answers."""
    ids = padded([probe.ids for probe in probes], model.device)
    begin = min(first for probe in probes for first, _ in probe.answers) - 1  # predicts the first answer's first token
    logits = model(ids, use_cache=False, logits_to_keep=ids.shape[1] - begin).logits
    spans = [(row, *answer) for row, probe in enumerate(probes) for answer in probe.answers]
    rows = torch.tensor([row for row, first, end in spans for _ in range(first, end)], device=ids.device)
    places = torch.tensor([place for _, first, end in spans for place in range(first, end)], device=ids.device)
    nats, hit = token_outcomes(logits, rows, places - 1 - begin, ids[rows, places])
    starts = np.cumsum([0, *(end - first for _, first, end in spans)])[:-1]
    cuts = np.cumsum([len(probe.answers) for probe in probes])[:-1]
    answers = (np.add.reduceat(nats, starts), hit[starts], np.logical_and.reduceat(hit, starts))
    return list(zip(*(np.split(values, cuts) for values in answers), strict=True))
