"""Recall probes: sequences with answers at known positions, scored by greedy exact match.

Answers are scored under teacher forcing: an answer counts if greedy decoding gives all of its tokens when the correct
answers to the earlier questions are in the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.continuations import token_budget
from deltanet_hf.evaluation.measures.scores import Score, clustered_score


@dataclass(frozen=True)
class Probe:
    """A sequence of questions with their answers.

    Attributes:
        ids: token ids [T].
        answers: span [begin, end) of the tokens of each answer.
    """

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
        # The logits at position begin - 1 predict the first token of the first answer.
        logits = model(ids, use_cache=False, logits_to_keep=length - begin + 1).logits
        greedy = logits.argmax(-1).cpu().numpy()
        for row, probe in enumerate(batch):
            correct = np.asarray(probe.ids)
            for first, end in probe.answers:
                right.append(float((greedy[row, first - begin : end - begin] == correct[first:end]).all()))
                owners.append(start + row)
    return clustered_score(right, owners)
