"""Changes to a converted model that a report measures beside it; neither needs training.

One shows how much of a hybrid's quality comes through its linear layers, the other what a conversion without a fitted
start begins with. The window + sinks baseline is a kind of layer (`deltanet_hf/mixers/window.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import Mixer


def linear_layers(model: PreTrainedModel) -> list[Mixer]:
    """The layers of a converted model with a recurrent state, in order. Raises UserError if there are none."""
    layers = [module for module in model.modules() if isinstance(module, Mixer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__}: no layer with a recurrent state; this baseline needs a converted model"
        )
    return layers


def switch_off_linear(model: PreTrainedModel) -> PreTrainedModel:
    """Make every layer with a recurrent state contribute exactly zero, in place; its state and cache still advance."""

    def silence(module: nn.Module, inputs: tuple, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        return torch.zeros_like(output[0]), None

    for layer in linear_layers(model):
        layer.register_forward_hook(silence)
    return model


@torch.no_grad()
def from_scratch_start(student: PreTrainedModel, teacher: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Turn `student` into an unfitted start of its own architecture, in place.

    Every weight that the teacher has is the teacher's again (key and value heads repeated where the student has one
    per query head). Everything else has the start of a mixer trained from scratch, with no fit to the teacher's
    attention. A converter without calibration writes the same.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in linear_layers(student):
        layer.start_from_scratch(float(getattr(student.config, "initializer_range", 0.02)), generator)
    source = _split_fused(teacher)
    for name, target in student.state_dict().items():
        if name in source:
            target.copy_(_repeat_heads(source[name], target, student))
    return student


def _repeat_heads(weight: Tensor, target: Tensor, student: PreTrainedModel) -> Tensor:
    """Repeat head blocks along the rows: head g of the target reads the teacher's head g // repeats."""
    if weight.shape == target.shape:
        return weight
    repeats = target.shape[0] // weight.shape[0]
    heads = student.config.num_key_value_heads
    return weight.unflatten(0, (heads, -1)).repeat_interleave(repeats, dim=0).flatten(0, 1)


def _split_fused(teacher: PreTrainedModel) -> dict[str, Tensor]:
    """The teacher's weights by name; the parts of a fused `qkv_proj` also as q_proj, k_proj and v_proj."""
    config = teacher.config
    groups = config.num_attention_heads // config.num_key_value_heads
    state: dict[str, Tensor] = {}
    for name, weight in teacher.state_dict().items():
        state[name] = weight
        if "qkv_proj" in name:
            head_rows = weight.shape[0] // (groups + 2)
            for part, rows in zip("qkv", weight.split([groups * head_rows, head_rows, head_rows]), strict=True):
                state[name.replace("qkv_proj", f"{part}_proj")] = rows
    return state
