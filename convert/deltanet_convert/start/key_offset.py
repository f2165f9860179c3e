"""Chooses how far the keys of each head are centred (`k_offset`), by the error on text that the search does not see.

The keys of a trained attention share a direction: in SmolLM2-135M it holds 42 to 73% of the squared unit key. Softmax
does not notice (the scores of a query move alike), but every read of a state then returns a share of all that was
written. The offset of a state is a share of its mean rotated key; token 0 is left out of the mean, because its key is
unlike the others. Some heads, and some whole layers, come closer to the teacher with a part of the mean, or without.

Shapes: n sequences, T tokens, S states, H query heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_hf.mixers.layer import DeltaRule

from .gate_fit import GateFit, head_metric, search_memory
from .samples import Samples

SHARES = (0.0, 0.5, 1.0)  # of the mean key


@torch.no_grad()
def choose_key_offset(layer: DeltaRule, fit: GateFit, samples: Samples) -> list[float]:
    """Sets the layer's `k_offset` and the keys of `samples`.

    For each share of the mean key, constant decay and write strength are searched as at the start of the fit; each
    state takes the share with the smallest error on sequences that the search does not see. With only one sequence,
    the errors are those of the search.

    Returns:
        The share per state; 0 where the keys are not centred.
    """
    assert layer.k_offset is not None
    mean = mean_keys(layer, samples)
    errors = []
    for share in SHARES:
        _set_offset(layer, samples, share * mean)
        seen, unseen = samples.halves()
        search_memory(fit, seen)
        missed = fit.heads(unseen) - unseen.heads  # [n, T, H, D]
        error = torch.einsum("nthd,hde,nthe->h", missed, head_metric(layer), missed)
        errors.append(error.view(layer.num_states, -1).sum(-1))
    shares = torch.tensor(SHARES)[torch.stack(errors).argmin(0)]
    _set_offset(layer, samples, shares.unsqueeze(-1) * mean)
    return shares.tolist()


def mean_keys(layer: DeltaRule, samples: Samples) -> Tensor:
    """The mean rotated key per state [S, D], without the first token of each sequence unless it is the only one."""
    total = torch.zeros(layer.num_states, layer.head_dim)
    for x in samples.x.split(1):
        _, k, _ = layer.project_qkv(x, samples.kwargs.get("position_embeddings"))
        total += k[0, -max(1, k.shape[1] - 1) :].mean(0)
    return total / len(samples)


def _set_offset(layer: DeltaRule, samples: Samples, offset: Tensor) -> None:
    assert layer.k_offset is not None
    layer.k_offset.weight.copy_(offset)
    samples.update_keys()
    layer.adapt_to(samples.kept[0].q, samples.kept[0].k)
