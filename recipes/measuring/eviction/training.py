"""Trains gates, and adapters beside them: forward KL to the teacher, and a penalty for what is kept beyond the target.

The ratio 1 / share rises evenly from 1 to that of the target over the first `RISE` of the steps. The penalty is
one-sided: nothing is paid for keeping less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltanet_recipes.schema import Long
from deltanet_recipes.training.adapters import MergedAdapters, merge_lora, train_for
from deltanet_recipes.training.losses import ChunkedLoss, Head, KlTerms, live_chunk
from deltanet_recipes.training.optim import make_optimizers, parameter_groups, rate_factor, set_rates
from measuring.eviction.gates import Gates

RISE = 0.75
PENALTY = 10.0  # nats per token for a share that is 1 too large
GATE_RATE = 0.05  # of AdamW: within 100 steps a gate can get from open to closed


def target(progress: float, share: float) -> float:
    """The share of tokens that may be kept when `progress` (0 to 1) of the steps are done."""
    return 1 / (1 + min(1.0, progress / RISE) * (1 / share - 1))


def train_gates(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    gates: Gates,
    rows: Tensor,
    stage: Long,
    share: float,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Train gates and, if the stage trains by LoRA, adapters, which are merged; the last rows give the threshold.

    Args:
        rows: token ids [N, T] int64, of which each step takes the next ones.
        share: of the tokens that are older than the window, to be kept in the end.
    """
    torch.manual_seed(seed)
    train_for(student, stage, seed)
    groups = parameter_groups(student, stage.optimizer)
    groups.append(
        {"name": "gates", "params": list(gates.parameters()), "peak_lr": GATE_RATE, "weight_decay": 0.0, "muon": False}
    )
    optimizers = make_optimizers(groups, fused=student.device.type == "cuda")
    trained = [parameter for group in groups for parameter in group["params"]]
    adapters = MergedAdapters(student) if student.device.type == "cuda" else None
    gates.train()
    began = 0.0
    for step, batch in enumerate(rows.split(stage.batch_tokens // rows.shape[1])):
        if adapters is not None:
            adapters.multiply()
        divergence = _divergence(teacher, student, batch.to(student.device), stage.loss_chunk)
        excess = F.relu(gates.kept - target(step / stage.steps, share))
        (divergence + PENALTY * excess).backward()
        torch.nn.utils.clip_grad_norm_(trained, stage.optimizer.clip)
        set_rates(optimizers, rate_factor(step, stage))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == stage.steps - 1:
            line = f"step {step}: KL {divergence.item():.4f}, kept {gates.kept.item():.3f}"
            began = began or time.perf_counter()  # the first step compiles
            say(f"{line}, {step * stage.batch_tokens / (time.perf_counter() - began):,.0f} tokens/s")
    merge_lora(student)
    student.to(dtype=teacher.dtype)  # type: ignore[call-arg]
    gates.eval()
    set_threshold(gates, student, rows[-(stage.batch_tokens // rows.shape[1]) :], share)


@torch.no_grad()
def set_threshold(gates: Gates, student: PreTrainedModel, rows: Tensor, share: float) -> None:
    """Set the threshold at which the gates keep `share` of the tokens of these rows [N, T]."""
    found = []
    for row in rows.split(1):
        _hidden(student, row.to(student.device))
        found.append(torch.cat([numbers.flatten() for numbers in gates.numbers]))
    gates.threshold = float(np.quantile(torch.cat(found).cpu().numpy(), 1 - share))


def _divergence(teacher: PreTrainedModel, student: PreTrainedModel, ids: Tensor, chunk: int) -> Tensor:
    """KL(teacher || student) [] in nats per token of rows [N, T]."""
    with torch.no_grad():
        wanted = _hidden(teacher, ids)
    got = _hidden(student, ids)
    heads: list[Any] = [model.lm_head.weight for model in (student, teacher)]  # type: ignore[union-attr]
    loss = live_chunk(Head.of(student), Head.of(teacher), KlTerms())
    total, _, _ = ChunkedLoss.apply(loss, chunk, got, heads[0], ids.flatten(), (wanted,), heads[1])
    return total / ids.numel()


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The last hidden states [N * T, D] of rows [N, T]."""
    decoder: Any = model.model
    return decoder(ids, use_cache=False).last_hidden_state.flatten(0, 1)
