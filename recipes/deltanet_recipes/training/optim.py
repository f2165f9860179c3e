"""Parameter groups, optimisers and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deltanet_hf.mixers.layer.layer_kind import kinds_among
from deltanet_hf.models.layers import layers_with_states
from deltanet_recipes.schema import Stage, StageBase, stage_name
from deltanet_recipes.schema_sections import Optimizer

SMALL = 16  # inputs or outputs of a linear layer up to which its weight counts as vectors
BETAS = (0.9, 0.95)  # moment decays of AdamW
MOMENTUM = 0.95  # of Muon
TAUGHT = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm")
"""Parts of a mixer that come from the teacher, by first names in it."""


def parameter_groups(module: nn.Module, settings: Optimizer) -> list[dict[str, Any]]:
    """Group the trainable parameters of a module by learning rate.

    The groups are `mixer` (new weights of mixers, at `mixer_lr`) and `rest` (all others, LoRA adapters included, at
    `rest_lr`). Of the mixers, `projection` (what the teacher has too, where it has a rate, `projection_lr`; else it is
    part of the rest) and `share` (the share of the window beside a state, if it has a rate, `share_lr`) are groups of
    their own. Each has a second group,
    NAME.vectors, for everything but matrices: vectors, convolutions, and linear layers with at most 16 inputs or
    outputs, such as a projection to one value per head. Weight decay and Muon apply to matrices only, and not to the
    share.

    Returns:
        Groups for `make_optimizers`, in the order of their names.
    """
    names = {
        id(p): _mixer_group(name, settings)
        for mixer in kinds_among(module.modules())
        for part in mixer.new_parts()
        for name, p in part.named_parameters()
        if p.requires_grad and "lora_" not in name
    }
    rates = {
        "mixer": settings.mixer_lr,
        "rest": settings.rest_lr,
        "projection": settings.projection_lr,
        "share": settings.share_lr,
    }
    matrices = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear) and min(m.weight.shape) > SMALL}
    groups: dict[str, dict[str, Any]] = {}
    for p in dict.fromkeys(p for p in module.parameters() if p.requires_grad):
        part = names.get(id(p), "rest")
        matrix = id(p) in matrices and part != "share"
        name, rate = part + ("" if matrix else ".vectors"), rates[part]
        assert rate is not None
        muon = matrix and settings.name == "muon"
        decay = settings.weight_decay if matrix else 0.0
        group = groups.setdefault(
            name, {"name": name, "params": [], "peak_lr": rate, "weight_decay": decay, "muon": muon}
        )
        group["params"].append(p)
    return [groups[name] for name in sorted(groups)]


def _mixer_group(name: str, settings: Optimizer) -> str:
    """The group of a mixer's parameter `name`, without ".vectors"."""
    first = name.partition(".")[0]
    if first == "window_branch" and settings.share_lr is not None:
        return "share"
    if first in TAUGHT:
        return "rest" if settings.projection_lr is None else "projection"
    return "mixer"


def unset_rates(stages: Sequence[Stage], student: nn.Module) -> str | None:
    """A line about the stages that set no rates of their own for a student with windows; None where all is set."""
    if not any(layer.softmax_parts for layer in layers_with_states(student)):
        return None
    names = [stage_name(stage) for stage in stages if stage.optimizer.share_lr is None]
    if not names:
        return None
    return (
        f"{', '.join(names)}: the student has windows and begins near its teacher; without optimizer.share_lr "
        "(mixer_lr or more), training can make it worse (docs/training.md)"
    )


def make_optimizers(groups: list[dict[str, Any]], fused: bool) -> list[torch.optim.Optimizer]:
    """AdamW for the groups, and Muon for those marked for it."""
    optimizers: list[torch.optim.Optimizer] = []
    adamw = [{k: v for k, v in group.items() if k != "muon"} for group in groups if not group["muon"]]
    muon = [{k: v for k, v in group.items() if k != "muon"} for group in groups if group["muon"]]
    if adamw:
        optimizers.append(torch.optim.AdamW(adamw, lr=0.0, betas=BETAS, fused=fused))
    if muon:
        optimizers.append(Muon(muon))
    return optimizers


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Jordan et al. 2024, "Muon"). Matrices of one shape are updated together.

    The update is scaled by 0.2 sqrt(max(shape)). Its root mean square is then that of an AdamW step, so AdamW's rates
    can be used (Liu et al. 2025, "Muon is scalable for LLM training", eq. 4).
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(list(groups), {"lr": 0.0, "momentum": MOMENTUM, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                grads = [p.grad for p in params if p.grad is not None]
                values: list[torch.Tensor] = list(params)
                for p in params:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffers = [self.state[p]["momentum_buffer"] for p in params]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
                update = orthogonalise(_stack(list(nesterov)))
                if group["weight_decay"]:
                    torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
                scale = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_(values, list(update.to(params[0].dtype).unbind()), alpha=-scale)


def _stack(matrices: list[torch.Tensor]) -> torch.Tensor:
    """M matrices [m, n] -> [M, m, n] bfloat16; one kernel copies them, unless they are sharded."""
    if isinstance(matrices[0], DTensor):
        return torch.stack(matrices).bfloat16()
    stacked = matrices[0].new_empty(len(matrices), *matrices[0].shape, dtype=torch.bfloat16)
    torch._foreach_copy_(list(stacked.unbind()), matrices)
    return stacked


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """Approximate the nearest semi-orthogonal matrices of x [M, m, n] by five quintic Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x  # strides like the weights', which one kernel then updates together


def rate_factor(step: int, stage: StageBase) -> float:
    """Learning rate at a step (counted from 0), divided by the peak rate.

    It rises linearly during the warm-up and then follows the stage's schedule down to `final_ratio`.
    """
    settings, steps = stage.optimizer, stage.steps
    warmup = round(settings.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, steps - 1 - warmup)
    shape = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.final_ratio + (1 - settings.final_ratio) * shape


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set the learning rate of every group to `factor` times its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
