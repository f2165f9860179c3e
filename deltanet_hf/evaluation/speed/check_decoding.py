"""Whether a way to decode computes what the model computes without a cache, before its speed is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.errors import QualityError
from deltanet_hf.evaluation.measures.decoding_mode import Mode
from deltanet_hf.evaluation.measures.speed import random_tokens

STEPS = 8
ROUNDING = {2: 0.25, 4: 1e-2, 8: 1e-6}
"""By the bytes of a number: how far below the best logit a chosen token may be, in standard deviations of the logits.
Two forms of one rule differ by rounding, so that nearly equal logits may change places."""
NOISE_FACTOR = 4.0  # each of two forms rounds several times per layer, and the worst of many tokens is counted
MOST = 1.0  # a token at random is more than three below


@torch.inference_mode()
def check_decoding(model: PreTrainedModel, mode: Mode, length: int = 300) -> float:
    """Decode greedily from two random prompts and compare each token with a complete forward pass of what came before.

    Deep models with random weights amplify rounding. If a token is further below the best than `ROUNDING` allows,
    the limit is what rounding does to this model's logits, measured by `rounding_noise`.

    Returns:
        How far the worst token is below the best, in standard deviations of the logits; 0 if all are the best.

    Raises:
        QualityError: it is further than rounding explains.
    """
    tokens = random_tokens(model, 2, length, seed=7)
    cache = DynamicCache(config=model.config)
    found = [mode.prompt(model, tokens, cache)]
    step = mode.step(model, cache)
    for _ in range(STEPS):
        found.append(step(found[-1]).clone())
    chosen = torch.cat(found, dim=1)  # [B, STEPS + 1]
    text = torch.cat([tokens, chosen[:, :-1]], dim=1)
    logits = _last_logits(model, text)
    below = logits.amax(-1) - logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    worst, most = float((below / logits.std(-1)).max()), ROUNDING[model.dtype.itemsize]
    if not worst <= most:
        most = max(most, min(MOST, NOISE_FACTOR * rounding_noise(model, text, logits)))
    if not worst <= most:  # NaN fails too
        raise QualityError(
            f"{mode.name}: a greedily decoded token is {worst:.3f} standard deviations below the best one of a "
            f"complete forward pass; rounding explains {most:.3g}, so the times would be of a wrong result"
        )
    return worst


def rounding_noise(model: PreTrainedModel, text: Tensor, logits: Tensor) -> float:
    """How far one more rounding per layer moves the logits of `text`: root mean square, in their standard deviations.

    Args:
        text: token ids [B, T].
        logits: those of the last STEPS + 1 tokens [B, STEPS + 1, V], without it.
    """
    generator = torch.Generator(text.device).manual_seed(7)

    def rounded(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        noise = torch.empty(hidden.shape, device=hidden.device).uniform_(-1, 1, generator=generator)
        hidden = (hidden * (1 + torch.finfo(hidden.dtype).eps * noise.to(torch.float64))).to(hidden.dtype)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handles = [layer.register_forward_hook(rounded) for layer in model.get_decoder().layers]
    try:
        moved = _last_logits(model, text)
    finally:
        for handle in handles:
            handle.remove()
    return float(((moved - logits) / logits.std(-1, keepdim=True)).square().mean().sqrt())


def _last_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    return model(text, use_cache=False, logits_to_keep=STEPS + 1).logits.float()
