"""Whether a way to decode computes what the model computes without a cache, before its speed is measured."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from deltanet_hf.errors import QualityError
from deltanet_hf.evaluation.measures.decoding_mode import Mode, read
from deltanet_hf.evaluation.measures.speed import random_tokens

STEPS = 8
ROUNDING = {2: 0.25, 4: 1e-2, 8: 1e-6}
"""By the bytes of a number: how far below the best logit a chosen token may be, in standard deviations of the logits.
Two forms of one rule differ by rounding, so that nearly equal logits may change places."""


@torch.inference_mode()
def check_decoding(model: PreTrainedModel, mode: Mode, batch: int = 2, length: int = 300) -> float:
    """Decode greedily from random prompts and compare each token with a complete forward pass of what came before.

    Returns:
        How far the worst token is below the best, in standard deviations of the logits; 0 if all are the best.

    Raises:
        QualityError: it is further than rounding explains.
    """
    tokens = random_tokens(model, batch, length, seed=7)
    cache = mode.cache(model, length + STEPS)
    found = [read(model, tokens, cache)]
    step = mode.step(model, cache)
    for _ in range(STEPS):
        found.append(step(found[-1]).clone())
    chosen = torch.cat(found, dim=1)  # [B, STEPS + 1]
    text = torch.cat([tokens, chosen[:, :-1]], dim=1)
    logits = model(text, use_cache=False, logits_to_keep=STEPS + 1).logits.float()
    below = logits.amax(-1) - logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    worst, most = float((below / logits.std(-1)).max()), ROUNDING[model.dtype.itemsize]
    if not worst <= most:  # NaN fails too
        raise QualityError(
            f"{mode.name}: a greedily decoded token is {worst:.3f} standard deviations below the best one of a "
            f"complete forward pass; rounding explains {most}, so the times would be of a wrong result"
        )
    return worst
