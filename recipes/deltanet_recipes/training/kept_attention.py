"""Query and key projections of the layers that keep softmax attention: held still in training, or put back after it.

Short training can ruin the lookup of far tokens in these layers while the loss on usual rows falls; the teacher's own
query and key projections repair it (arXiv 2606.11052).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.models.layers import INSERTED_QK_NORMS
from deltanet_recipes.schema import DistilBase, stage_name
from deltanet_recipes.training.model_pair import decoder_layers, load_student, mixer_name

SEPARATE = ("q_proj", "k_proj", "q_norm", "k_norm")
FUSED = "qkv_proj"  # phi3


def kept_attention(student: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """The softmax attention modules of a student: layer index, name and module.

    They are whole layers, with or without something added, and the softmax part of mixed heads.
    """
    for index, layer in enumerate(decoder_layers(student)):
        name = mixer_name(layer)
        module = layer.get_submodule(name)
        for branch, attention in branches_of(module).items():
            if kind_of(attention).keeps_all_tokens:
                yield index, ".".join(filter(None, ("model.layers", str(index), name, branch))), attention


def query_key_parts(student: nn.Module) -> Iterator[tuple[str, nn.Module, int | None]]:
    """Name and module of each query or key projection and norm, without the norms that the conversion inserted.

    The number is how many of the module's first rows belong to queries and keys, where values share the module (phi3);
    otherwise None.
    """
    config: Any = student.config
    inserted = getattr(config, INSERTED_QK_NORMS, ())
    for index, where, attention in kept_attention(student):
        if hasattr(attention, FUSED):
            heads = attention.config
            rows = (heads.num_attention_heads + heads.num_key_value_heads) * attention.head_dim
            yield f"{where}.{FUSED}", getattr(attention, FUSED), rows
            continue
        for name in SEPARATE:
            part = getattr(attention, name, None)
            if part is not None and not (name.endswith("norm") and index in inserted):
                yield f"{where}.{name}", part, None


@contextmanager
def shared_rows_held(student: nn.Module, stage: DistilBase, sharded: bool) -> Iterator[None]:
    """Hold the rows of queries and keys in matrices that they share with values, if the stage says `kept_qk: frozen`.

    Their gradient is set to zero. The rows of an adapter begin at zero and stay there.

    Raises:
        UserError: weight decay, which would shrink such rows, or sharded weights, whose rows are elsewhere.
    """
    handles = []
    for name, part, rows in query_key_parts(student) if stage.kept_qk == "frozen" else ():
        if rows is None:
            continue
        if stage.optimizer.weight_decay > 0 or sharded:
            key = "engine.sharding to none" if sharded else "optimizer.weight_decay to 0"
            label = stage_name(stage)  # type: ignore[arg-type]  # every DistilBase is a Stage
            raise UserError(
                f"stages.{label}.kept_qk: {name} holds queries, keys and values in one matrix, of which "
                f"only a part is to be frozen; set {key}, or kept_qk to restore"
            )
        for own, parameter in part.named_parameters():
            if parameter.requires_grad and "lora_A" not in own:
                handles.append(parameter.register_hook(_without_first(rows)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_first(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: torch.cat([torch.zeros_like(gradient[:rows]), gradient[rows:]])


@torch.no_grad()
def put_back_queries_and_keys(student: nn.Module, folder: str) -> None:
    """Carry out `kept_qk: restore` at the end of a run: take these weights from the model that the run began with."""
    before = {name: (part, rows) for name, part, rows in query_key_parts(load_student(folder))}
    for name, part, _ in query_key_parts(student):
        origin, rows = before[name]
        for own, parameter in part.named_parameters():
            parameter[:rows] = origin.get_parameter(own)[:rows].to(parameter)
