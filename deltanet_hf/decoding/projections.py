"""Brings the projections of a model's layers together in memory, so that a decoding step multiplies by few blocks."""

from __future__ import annotations

from torch import nn

from deltanet_hf.decoding.fused_mlps import is_known
from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.joint_projection import join


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
