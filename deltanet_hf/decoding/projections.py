"""Brings the projections of a model's layers together in memory, so that a layer multiplies by few blocks."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from deltanet_hf.decoding.fused_mlps import is_known
from deltanet_hf.decoding.obstacles import is_replaced
from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.joint_projection import join

TRAINED = -1
_seen: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # the address of the first weight, or TRAINED


def join_projections(model: nn.Module) -> None:
    """Move the weights of each layer's projections behind one another, one layer at a time; of attention and MLP.

    Values, names and saved files stay as they are; addresses change. Where it has been done, nothing happens.
    `joint_projection.py` says which layers are left alone.
    """
    for module in model.modules():
        if isinstance(module, Mixer):
            join(module.step_projections())
        elif is_known(module):
            join((module.gate_proj, module.up_proj))  # type: ignore[arg-type]


def join_for_inference(model: nn.Module) -> None:
    """`join_projections` in the first call of a model without gradients, and again where it has been moved since.

    Nothing is moved in a model that is trained, or may be: CUDA graphs of its steps hold the addresses of all weights,
    also of those that have no gradient.
    """
    place = next(model.parameters()).data_ptr()
    if _seen.get(model, 0) in (place, TRAINED) or model.training:
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    _seen[model] = place
    if not any(module.training or is_replaced(module) for module in model.modules()) and not _is_trained(model):
        join_projections(model)


def leave_in_place(model: nn.Module) -> None:
    """Have `join_for_inference` move nothing any more: the model is called with gradients."""
    _seen[model] = TRAINED


def _is_trained(model: nn.Module) -> bool:
    """Whether a weight has a gradient, or only some are to get one."""
    weights = list(model.parameters())
    return any(one.grad is not None for one in weights) or len({one.requires_grad for one in weights}) > 1
