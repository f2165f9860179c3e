"""Runs a layer's experts without loading them: the weights of one expert at a time are read when it is used.

The family's own loop over the experts runs. It takes the weights of an expert by an index into a parameter
[experts, ...], and here a file stands where the parameter was.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .storage.safetensors_folder import Checkpoint


class StoredExperts:
    """The weights of a layer's experts: `experts[i]` reads those of expert i (0-d integer) in float32."""

    rounding: torch.dtype | None = None  # the weights are rounded to this dtype first

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.checkpoint, self.name = checkpoint, name

    def __getitem__(self, expert: Tensor) -> Tensor:
        weights = self.checkpoint.read_index(self.name, int(expert), torch.float32)
        if self.rounding is not None:
            weights = weights.to(self.rounding).float()
        return weights.to(expert.device)


def expert_parameters(layer: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """The parameters [experts, ...] of a decoder layer: their modules, their names there and in the layer."""
    for module_name, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                yield module, name, f"{module_name}.{name}", parameter


def leave_experts_stored(layer: nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    """Puts `StoredExperts` in the places of the experts' parameters, which the layer then does not have any more."""
    for module, name, name_in_layer, _ in list(expert_parameters(layer)):
        del module._parameters[name]
        module.__dict__[name] = StoredExperts(checkpoint, prefix + name_in_layer)


def round_experts(layer: nn.Module, dtype: torch.dtype) -> None:
    """From now on, the layer's experts compute with weights that are rounded to `dtype`."""
    for module in layer.modules():
        for value in vars(module).values():
            if isinstance(value, StoredExperts):
                value.rounding = dtype
