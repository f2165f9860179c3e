"""Lesions: a part of a model is taken away, to see what goes through it. `baselines.switch_off_linear` is another.

A lesion changes the model in place and needs no training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.baselines import linear_layers
from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.layer_kind import LayerKind, branches_of
from deltanet_hf.mixers.layer.window_branch import WindowBranch

_QUESTION = 16  # tokens of the longest question of the probes in this package


def switch_off_softmax(model: PreTrainedModel) -> PreTrainedModel:
    """Make the teacher's softmax attention, in whole layers and in mixed heads, contribute exactly zero.

    Raises UserError if there is none.
    """
    branches = (branch for layer in model.model.layers for branch in branches_of(layer.self_attn).values())
    found: list[nn.Module] = [branch for branch in branches if not isinstance(branch, LayerKind)]
    if not found:
        raise UserError(f"{type(model).__name__}: no layer with softmax attention; this lesion needs one")

    def silence(module: nn.Module, inputs: tuple, output: tuple) -> tuple:
        return torch.zeros_like(output[0]), *output[1:]

    for attention in found:
        attention.register_forward_hook(silence)
    return model


def switch_off_window(model: PreTrainedModel) -> PreTrainedModel:
    """Leave out the window of every layer that has one beside its state. UserError if there is none."""
    return _fix_share(model, 1.0)


def switch_off_state(model: PreTrainedModel) -> PreTrainedModel:
    """Leave out the state of every layer that has a window beside it. UserError if there is none."""
    return _fix_share(model, 0.0)


def _fix_share(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """Give the state this share of the output, at every token and head."""
    branches = [module for module in model.modules() if isinstance(module, WindowBranch)]
    if not branches:
        raise UserError(f"{type(model).__name__}: no layer with a window beside its state; this lesion needs one")

    def fixed(x: Tensor, lse: Tensor, numbers: Tensor) -> Tensor:
        return torch.full_like(lse, share)

    for branch in branches:
        branch.share = fixed  # type: ignore[method-assign]
    return model


@torch.inference_mode()
def exact_with_zeroed_states(model: PreTrainedModel, probes: Sequence[Probe]) -> list[bool]:
    """Whether the first answer of each probe is exact when all states are set to zero before its question.

    Caches of keys and values, windows and the tails of short convolutions stay. The last 16 tokens before the first
    answer count as the question.

    Raises UserError if the model has no layer with a recurrent state.
    """
    names = [(layer.layer_idx, tuple(layer.recurrent_shapes())) for layer in linear_layers(model)]
    right = []
    for probe in probes:
        begin, end = probe.answers[0]
        ids = torch.tensor([probe.ids[:end]], device=model.device)
        asked = max(1, begin - _QUESTION)
        cache = DynamicCache(config=model.config)
        model(ids[:, :asked], use_cache=True, logits_to_keep=1, **{CACHE: cache})
        for index, tensors in names:
            kept = getattr(cache.layers[index], "parts", {}).get("linear", cache.layers[index])  # of mixed heads
            assert isinstance(kept, MixerCacheLayer)
            for name in tensors:
                kept.state[name].zero_()
        greedy = model(ids[:, asked:], use_cache=True, **{CACHE: cache}).logits[0].argmax(-1)
        right.append(bool((greedy[begin - asked - 1 : -1] == ids[0, begin:end]).all()))
    return right
