"""Inserts q/k norms into softmax attention that has none, so that the attention changes as little as possible.

RMSNorm divides q and k by their size, per head and token, and one weight for all heads cannot restore it. But the norm
can be made to divide by a constant. If one channel of each head is w sqrt(D) for every token, and w is large compared
with the other channels, then rms(q) ~ w and

    norm(q) = w q / rms(q) ~ q.

That channel may not affect the scores: its rotary partner is set to 0, and so is the same rotary pair in k. Each
key/value head and its query heads therefore give up two of their D/2 rotary pairs, one for the constant of q and one
for the constant of k. The pairs that affect the attention least are chosen.

The constant comes from the layer's inputs x, which are normalised: least squares find u with u . x ~ 1. An error
rescales the token's q (or k), so every token is weighted by the effect of that on the attention p: to second order, a
change d of the logits has KL = 1/2 Var_p(d). Qwen3.5 has no biases; they are added through u too, as W + b u^T. For q
and k the division restores them exactly: (W x + b (u . x)) / (u . x).

Shapes in names and comments: n sequences, T tokens, H query heads, S key/value heads, G = H/S, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Sizes of the constant that are tried, in units of the largest head's root mean square. At 8 the norm shrinks q by
# 1/128 on average. Smaller sizes are better if no direction is constant enough; 0 is a plain norm and gives up no pair.
SIZES = (0.0, 1.0, 2.0, 4.0, 8.0)
RIDGE = 1e-2  # ridge of the least squares, relative to the inputs' mean square
SEARCH_SEQUENCES = 2  # number of sequences on which pairs and size are chosen


@dataclass(frozen=True)
class Fit:
    """The choices for one layer."""

    size: float  # one of SIZES
    q_pairs: list[int]  # per key/value head, the rotary pair of q's constant; empty for size 0
    k_pairs: list[int]


@torch.no_grad()
def insert_norms(attention: Any, normed: Any, x: Tensor, kwargs: dict[str, Any]) -> Fit:
    """Sets every parameter of `normed`. Of `SIZES`, the one with the smallest KL of the attention is used.

    Args:
        attention: the teacher's attention, float32.
        normed: a Qwen3 attention without biases, float32.
        x: attention inputs [n, T, hidden].
        kwargs: the attention's other arguments, for a batch of one.
    """
    normed.requires_grad_(False)
    pairs = _least_important_pairs(attention, x[:SEARCH_SEQUENCES], kwargs)
    ones = {name: constant_direction(x, weights) for name, weights in _token_weights(attention, x, kwargs).items()}
    scales = {name: _largest_head(attention, name, x) for name in "qk"}
    fits = [Fit(size, *(pairs if size else ([], []))) for size in SIZES]
    losses = []
    for fit in fits:
        _fill(normed, attention, fit, ones, scales)
        losses.append(compare_attention(attention, normed, x[:SEARCH_SEQUENCES], kwargs)[0])
    best = fits[min(range(len(fits)), key=losses.__getitem__)]
    _fill(normed, attention, best, ones, scales)
    return best


def _largest_head(attention: Any, name: str, x: Tensor) -> float:
    """The largest root mean square of a head of q or k (`name`)."""
    heads = getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, int(attention.head_dim)))
    return max(1e-3, float(heads.square().mean((0, 1, 3)).max().sqrt()))


def _fill(normed: Any, attention: Any, fit: Fit, ones: dict[str, Tensor], scales: dict[str, float]) -> None:
    """Writes the weights of `normed` for one choice; ones: u per projection; scales: `_largest_head` of q and k."""
    dim, groups = int(attention.head_dim), int(attention.num_key_value_groups)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        source, target = getattr(attention, name), getattr(normed, name).weight
        target.copy_(source.weight)
        if source.bias is not None:
            target += torch.outer(source.bias, ones[name[0]])
    for name, own, other, repeat in (("q", fit.q_pairs, fit.k_pairs, groups), ("k", fit.k_pairs, fit.q_pairs, 1)):
        weight = scales[name] * (1 + fit.size**2) ** 0.5
        norm = getattr(normed, f"{name}_norm").weight
        norm.fill_(norm.new_tensor(weight).bfloat16())  # exact in every dtype
        if fit.size == 0:
            continue
        rows = getattr(normed, f"{name}_proj").weight.unflatten(0, (-1, dim))  # [heads, D, hidden], a view
        for head in range(len(rows)):
            mine, others = own[head // repeat], other[head // repeat]
            rows[head, [mine + dim // 2, others, others + dim // 2]] = 0.0
            rows[head, mine] = fit.size * scales[name] * dim**0.5 * ones[name]


def constant_direction(x: Tensor, weights: Tensor) -> Tensor:
    """Returns u [hidden] with u . x ~ 1 by least squares, for x [n, T, hidden] and weights [n, T] >= 0."""
    flat, share = x.flatten(0, 1), weights.flatten()
    share = share / share.mean().clamp_min(1e-30)
    system = flat.T @ (flat * share.unsqueeze(1)) / len(flat)
    system += RIDGE * system.diagonal().mean().clamp_min(1e-20) * torch.eye(len(system), device=x.device)
    return torch.linalg.solve(system, (flat * share.unsqueeze(1)).mean(0))


@torch.no_grad()
def compare_attention(attention: Any, normed: Any, x: Tensor, kwargs: dict[str, Any]) -> tuple[float, float]:
    """Returns the KL of the attention in nats and the relative RMS error of its logits, for inputs x [n, T, hidden]."""
    kl = error = size = 0.0
    for row in x.split(1):
        want, got = (_logits(module, *_projected(module, row), kwargs) for module in (attention, normed))
        seen = _seen(want, kwargs)
        p = want.masked_fill(~seen, -torch.inf).softmax(-1)
        difference = (got - want).masked_fill(~seen, 0.0)
        # log p - log p' = log sum_j p exp(difference) - difference
        kl += float(((p.log() + difference).logsumexp(-1) - (p * difference).sum(-1)).double().mean())
        error += float(_about_mean(difference, seen).double().square().sum())
        size += float(_about_mean(want.masked_fill(~seen, 0.0), seen).double().square().sum())
    return kl / len(x), (error / max(size, 1e-30)) ** 0.5


def _about_mean(logits: Tensor, seen: Tensor) -> Tensor:
    return (logits - logits.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)).masked_fill(~seen, 0.0)


def _projected(attention: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Computes q [n, T, H, D] and k [n, T, S, D], after the norms if there are any."""
    q, k = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, int(attention.head_dim))) for n in "qk")
    norms = [getattr(attention, f"{n}_norm", None) or nn.Identity() for n in "qk"]
    return norms[0](q), norms[1](k)


def _rotated(attention: Any, q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Applies the rotary embedding and repeats k to the query heads; returns q and k [n, H, T, D]."""
    cos, sin = kwargs["position_embeddings"]
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q, k.repeat_interleave(int(attention.num_key_value_groups), dim=1)


def _logits(attention: Any, q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Attention logits [n, H, T, T] without the mask."""
    q, k = _rotated(attention, q, k, kwargs)
    return q @ k.mT * attention.scaling  # type: ignore[no-any-return]


def _seen(logits: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Marks [1, 1, T, T] the keys that each query attends to."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        length = logits.shape[-1]
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=logits.device).tril()
    return mask if mask.dtype == torch.bool else mask == 0


def _attention_of(attention: Any, x: Tensor, kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields per sequence q [1, T, H, D], k [1, T, S, D], the mask of `_seen` and the attention [1, H, T, T]."""
    for row in x.split(1):
        q, k = _projected(attention, row)
        logits = _logits(attention, q, k, kwargs)
        seen = _seen(logits, kwargs)
        yield q, k, seen, logits.masked_fill(~seen, -torch.inf).softmax(-1)


def _least_important_pairs(attention: Any, x: Tensor, kwargs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Per key/value head, the two rotary pairs whose removal changes the attention of its heads least."""
    dim, groups = int(attention.head_dim), int(attention.num_key_value_groups)
    loss = x.new_zeros(dim // 2, attention.q_proj.out_features // dim)
    for q, k, _, p in _attention_of(attention, x, kwargs):
        q_HTD, k_HTD = (z[0] for z in _rotated(attention, q, k, kwargs))
        for pair in range(dim // 2):
            channels = [pair, pair + dim // 2]
            part = q_HTD[..., channels] @ k_HTD[..., channels].mT * attention.scaling
            loss[pair] += _variance(p[0], part).mean(-1)
    order = loss.unflatten(1, (-1, groups)).sum(2).argsort(0)  # [D/2, S]
    return order[0].tolist(), order[1].tolist()


def _token_weights(attention: Any, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Per token [n, T], the effect of a relative error of its q, k (without biases) and v, summed over the heads."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    for q, k, seen, p in _attention_of(attention, x, kwargs):
        logits = _logits(attention, q - _bias(attention, "q"), k, kwargs).masked_fill(~seen, 0.0)
        found["q"].append(_variance(p, logits).sum((0, 1)))
        logits = _logits(attention, q, k - _bias(attention, "k"), kwargs).masked_fill(~seen, 0.0)
        found["k"].append((p * (1 - p) * logits.square()).sum((0, 1, 2)))
        found["v"].append(p.sum((0, 1, 2)))
    return {name: torch.stack(parts) for name, parts in found.items()}


def _bias(attention: Any, name: str) -> Tensor | float:
    bias = getattr(attention, f"{name}_proj").bias
    return 0.0 if bias is None else bias.unflatten(0, (-1, int(attention.head_dim)))


def _variance(p: Tensor, values: Tensor) -> Tensor:
    """Variance of `values` [..., T] under the probabilities p [..., T]."""
    mean = (p * values).sum(-1, keepdim=True)
    return (p * (values - mean).square()).sum(-1)
