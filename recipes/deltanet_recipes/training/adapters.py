"""Chooses the weights that a stage trains.

Weights that the teacher does not have are always trained in full: those of mixers, and the q/k norms that the
conversion inserted into softmax layers. Distillation stages train everything else by LoRA, in full, or not at all
(`train`), the teacher's projections in mixers too: trained in full, these leave a start that is nearly exact and do not
come back (docs/training.md). The mixers of an imported model are pretrained, so LoRA adapts them as it does the rest.
"""

from __future__ import annotations

import warnings
from types import MethodType
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F

from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.models.layers import INSERTED_QK_NORMS
from deltanet_recipes.schema import Align, Stage
from deltanet_recipes.training.model_pair import decoder_layers, is_imported, mixer_name, mixers
from deltanet_recipes.training.optim import TAUGHT

MOST_MERGED = 2**22  # weights of a matrix up to which `MergedAdapters` are faster on a GPU


def inserted_norms(student: nn.Module) -> list[nn.Module]:
    """The q/k norms that `deltanet-hf convert --profile qwen3_5` inserted into the softmax layers of the student."""
    layers = decoder_layers(student)
    attentions = [layers[index].self_attn for index in getattr(student.config, INSERTED_QK_NORMS, ())]
    return [norm for attention in attentions for norm in (attention.q_norm, attention.k_norm)]


def train_for(student: nn.Module, stage: Stage, seed: int) -> None:
    """Prepare the student for a stage: add adapters for `train: lora` and set what requires gradients.

    Trained weights become float32; autocast computes with them in bfloat16.

    Args:
        seed: random seed of new adapters.
    """
    student.requires_grad_(False)
    converted = mixers(student).values()
    parts = [part for mixer in converted for part in mixer.new_parts()]
    in_full = stage.optimizer.projection_lr is not None
    if isinstance(stage, Align):
        _train(parts, in_full)
        return
    new = inserted_norms(student)
    if not (stage.train == "lora" and is_imported(student)):
        new += parts
    _train(new, in_full)
    if stage.train == "full":
        decoder_layers(student).float().requires_grad_(True)
        student.model.norm.float().requires_grad_(True)  # type: ignore[union-attr, operator]
    elif stage.train == "lora" and (targets := lora_targets(student, stage.lora_targets, in_full)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(r=stage.lora_rank, lora_alpha=stage.lora_rank, lora_dropout=0.0, target_modules=targets)
            with warnings.catch_warnings():  # PEFT asks transformers for a property that will have another name
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                get_peft_model(student, config)  # puts the adapters into `student` itself
        _train(new, in_full)
        for name, parameter in student.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()


def _train(parts: list[nn.Module], in_full: bool) -> None:
    """Train these modules, `in_full` or without what a mixer has from the teacher (`optim.TAUGHT`)."""
    for part in parts:
        for name, parameter in part.named_parameters():
            if in_full or name.partition(".")[0] not in TAUGHT:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)


def lora_targets(student: nn.Module, on: Literal["all", "attention"], in_full: bool = False) -> list[str]:
    """Names of the linear layers that get adapters.

    These are the linear layers of attention with the teacher's weights (softmax and windows, also where they are heads
    of a layer, and the projections of mixers unless they are trained `in_full`) and, `on` all, of MLPs; experts and
    routers are no linear layers. In an imported model they include all of mixers, except for the ones in the mixer's
    `without_lora`.
    """
    imported, names = is_imported(student), []
    for index, layer in enumerate(decoder_layers(student)):
        for part in ("mlp", mixer_name(layer)) if on == "all" else (mixer_name(layer),):
            room = getattr(layer, part, None)
            if room is None:  # experts under another name
                continue
            kind, new = kind_of(room), set()
            for own in () if imported else kind.new_parts():
                taught = () if in_full else (getattr(own, part, None) for part in TAUGHT)
                new |= set(own.modules()).difference(taught)
            names += [
                f"model.layers.{index}.{part}.{name}"
                for name, module in room.named_modules()
                if isinstance(module, nn.Linear)
                and module not in new
                and name.rpartition(".")[2] not in kind.without_lora
            ]
    return names


class MergedAdapters:
    """Lets small linear layers multiply with the sum of weight and adapters, instead of with each.

    On a GPU this saves four products with all tokens for one with the gradient of the sum, which is faster where the
    matrix is small. The adapters of all matrices of one shape are multiplied at once, by `multiply`, which comes
    before every forward pass. The sum has the dtype of the weight, as the model that is saved in the end.
    """

    def __init__(self, student: nn.Module) -> None:
        self._groups: dict[torch.Size, list[Any]] = {}
        layers: list[Any] = [module for module in student.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            shape = layer.get_base_layer().weight.shape
            if shape.numel() <= MOST_MERGED:
                layer.forward = MethodType(_merged_forward, layer)
                self._groups.setdefault(shape, []).append(layer)

    def multiply(self) -> None:
        """Give each layer the product of its adapters."""
        for layers in self._groups.values():
            (name,) = layers[0].active_adapters
            up = torch.stack([layer.lora_B[name].weight for layer in layers])
            down = torch.stack([layer.lora_A[name].weight for layer in layers])
            for layer, product in zip(layers, (up @ down).unbind(), strict=True):
                layer.product = product


def _merged_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    linear = layer.get_base_layer()
    return F.linear(x, linear.weight + layer.product.to(linear.weight.dtype), linear.bias)


@torch.no_grad()
def merge_lora(student: nn.Module) -> None:
    """Add the adapters to the weights, in float32, and put the plain linear layers back in their places."""
    for name, module in list(student.named_modules()):
        if not isinstance(module, LoraLayer):
            continue
        linear = module.get_base_layer()
        linear.float()
        module.merge()
        student.set_submodule(name, linear)
    if hasattr(student, "peft_config"):
        del student.peft_config  # else PEFT would treat the adapters of the next stage as additional ones
