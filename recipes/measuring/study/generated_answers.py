"""Recall by generation: the first answer of each probe, decoded greedily through the cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.evaluation.measures.continuations import token_budget
from deltanet_hf.evaluation.measures.decoding_mode import read
from deltanet_hf.evaluation.measures.probes import Probe


def generated_answers(model: PreTrainedModel, probes: Sequence[Probe]) -> list[float]:
    """Per probe, 1 if its first answer is generated in full from the sequence up to its question, else 0.

    It differs from `answer_outcomes` in what computes it: the prompt is read into the cache and every token of the
    answer is a decoding step of its own, as in use.
    """
    by_length: dict[int, list[int]] = defaultdict(list)  # equal lengths need no padding
    for index, probe in enumerate(probes):
        by_length[probe.answers[0][0]].append(index)
    right = [0.0] * len(probes)
    for length, indices in by_length.items():
        rows = max(1, token_budget(model) // length)
        for start in range(0, len(indices), rows):
            batch = indices[start : start + rows]
            answers = [probes[i].ids[slice(*probes[i].answers[0])] for i in batch]
            prompts = torch.tensor([probes[i].ids[:length] for i in batch], device=model.device)
            made = greedy_tokens(model, prompts, max(map(len, answers))).tolist()
            for index, answer, tokens in zip(batch, answers, made, strict=True):
                right[index] = float(tuple(tokens[: len(answer)]) == answer)
    return right


@torch.inference_mode()
def greedy_tokens(model: PreTrainedModel, prompts: Tensor, count: int) -> Tensor:
    """The `count` most likely next tokens [B, count] of prompts [B, T] int64, one decoding step per token."""
    cache = DynamicCache(config=model.config)
    token = read(model, prompts, cache)
    made = [token]
    for _ in range(count - 1):
        token = read(model, token, cache)
        made.append(token)
    return torch.cat(made, dim=1)
