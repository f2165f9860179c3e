"""Rewrites a converted model's tensors as Qwen3.5's and back, exactly, one module per function.

`read(name)` returns a tensor in the export's dtype; decays and, in an export, the norms of q and k are in float32.
Every function yields the tensors of one module with their new names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltanet_hf.errors import UserError

from ..start.copy_weights import expand_heads
from .norms import centre, divide_columns, multiply_columns, uncentre

Read = Callable[[str], Tensor]
Named = Iterator[tuple[str, Tensor]]
FLOAT32_SUFFIXES = ("A_log", "dt_bias", "q_norm.weight", "k_norm.weight")  # float32 in an export


@dataclass(frozen=True)
class Heads:
    """Head counts of a converted layer. The export repeats each of the `states` heads to get `queries` heads."""

    queries: int
    states: int
    size: int

    @property
    def times(self) -> int:
        return self.queries // self.states


def to_linear_attn(read: Read, source: str, target: str, heads: Heads, factors: Tensor | None) -> Named:
    """Rewrites a converted linear layer.

    Args:
        source, target: name prefixes such as 'model.layers.3.self_attn.' and 'model.layers.3.linear_attn.'.
        factors: powers of two [hidden] of the norm before the layer; None for 1.
    """

    def columns(name: str) -> Tensor:
        return divide_columns(read(source + name), factors, source + name)

    def repeated(rows: Tensor, size: int) -> Tensor:
        return expand_heads(rows, size, heads.times)

    q, k, v = (columns(f"{name}_proj.weight") for name in "qkv")
    yield target + "in_proj_qkv.weight", torch.cat([q, repeated(k, heads.size), repeated(v, heads.size)])
    q, k, v = read(source + "conv1d.weight").split([len(q), len(k), len(v)])
    yield target + "conv1d.weight", torch.cat([q, repeated(k, heads.size), repeated(v, heads.size)])
    yield target + "in_proj_z.weight", columns("g_proj.weight")
    yield target + "in_proj_a.weight", repeated(columns("a_proj.weight"), 1)
    yield target + "in_proj_b.weight", repeated(columns("b_proj.weight"), 1)
    yield target + "A_log", repeated(read(source + "decay.A_log"), 1)
    yield target + "dt_bias", repeated(read(source + "decay.dt_bias"), 1)
    yield target + "norm.weight", read(source + "norm.weight")
    yield target + "out_proj.weight", read(source + "o_proj.weight")


def from_linear_attn(read: Read, source: str, target: str, heads: Heads, factors: Tensor | None) -> Named:
    """Undoes `to_linear_attn`; the two prefixes are exchanged.

    Raises:
        UserError: heads that the export had repeated are no longer equal.
    """

    def columns(name: str) -> Tensor:
        return multiply_columns(read(source + name), factors)

    def first_copies(rows: Tensor, size: int, name: str) -> Tensor:
        groups = rows.unflatten(0, (heads.states, heads.times, size))
        if not torch.equal(groups, groups[:, :1].expand_as(groups)):
            raise _trained(source + name, "heads that were copies of each other differ")
        return groups[:, 0].flatten(0, 1)

    parts = [heads.queries * heads.size] * 3
    yield target + "q_proj.weight", (qkv := columns("in_proj_qkv.weight").split(parts))[0]
    yield target + "k_proj.weight", first_copies(qkv[1], heads.size, "in_proj_qkv.weight")
    yield target + "v_proj.weight", first_copies(qkv[2], heads.size, "in_proj_qkv.weight")
    q, k, v = read(source + "conv1d.weight").split(parts)
    k, v = (first_copies(rows, heads.size, "conv1d.weight") for rows in (k, v))
    yield target + "conv1d.weight", torch.cat([q, k, v])
    yield target + "g_proj.weight", columns("in_proj_z.weight")
    for name in "ab":
        rows = columns(f"in_proj_{name}.weight")
        yield target + f"{name}_proj.weight", first_copies(rows, 1, f"in_proj_{name}.weight")
    for name in ("A_log", "dt_bias"):
        yield target + f"decay.{name}", first_copies(read(source + name), 1, name)
    yield target + "norm.weight", read(source + "norm.weight")
    yield target + "o_proj.weight", read(source + "out_proj.weight")


def to_gated_attention(read: Read, prefix: str, head_dim: int, factors: Tensor | None) -> Named:
    """Rewrites the attention of a kept Qwen3 layer: an output gate of sigmoid(0) = 1/2 and a doubled projection."""
    q = divide_columns(read(prefix + "q_proj.weight"), factors, prefix + "q_proj.weight")
    per_head = q.unflatten(0, (-1, head_dim))  # [H, D, hidden]; Qwen3.5: per head D rows of q, D rows of gate
    yield prefix + "q_proj.weight", torch.cat([per_head, torch.zeros_like(per_head)], dim=1).flatten(0, 1)
    for name in ("k_proj.weight", "v_proj.weight"):
        yield prefix + name, divide_columns(read(prefix + name), factors, prefix + name)
    o = 2 * read(prefix + "o_proj.weight")
    if not bool(torch.isfinite(o).all()):
        raise UserError(f"{prefix}o_proj.weight: twice its values overflow; choose --dtype bfloat16 or float32")
    yield prefix + "o_proj.weight", o
    for name in ("q_norm.weight", "k_norm.weight"):
        yield prefix + name, centre(read(prefix + name), torch.float32)


def from_gated_attention(read: Read, prefix: str, head_dim: int, factors: Tensor | None, dtype: torch.dtype) -> Named:
    """Undoes `to_gated_attention`; UserError if the gate is no longer 0."""
    q, gate = read(prefix + "q_proj.weight").unflatten(0, (-1, 2 * head_dim)).split(head_dim, dim=1)
    if bool(gate.any()):
        raise _trained(prefix + "q_proj.weight", "the attention gate is no longer 0")
    yield prefix + "q_proj.weight", multiply_columns(q.flatten(0, 1), factors)
    for name in ("k_proj.weight", "v_proj.weight"):
        yield prefix + name, multiply_columns(read(prefix + name), factors)
    yield prefix + "o_proj.weight", read(prefix + "o_proj.weight") / 2
    for name in ("q_norm.weight", "k_norm.weight"):
        yield prefix + name, uncentre(read(prefix + name), None, dtype)


def to_mlp(read: Read, prefix: str, factors: Tensor | None) -> Named:
    """Rewrites the MLP, whose projections `gate` and `up` read the second norm's output."""
    for name in ("gate_proj.weight", "up_proj.weight"):
        yield prefix + name, divide_columns(read(prefix + name), factors, prefix + name)
    yield prefix + "down_proj.weight", read(prefix + "down_proj.weight")


def from_mlp(read: Read, prefix: str, factors: Tensor | None) -> Named:
    """Undoes `to_mlp`."""
    for name in ("gate_proj.weight", "up_proj.weight"):
        yield prefix + name, multiply_columns(read(prefix + name), factors)
    yield prefix + "down_proj.weight", read(prefix + "down_proj.weight")


# A `deltanet_qwen3_5_text` layer has Qwen3.5's own head counts: no head is repeated and only the names differ.
QWEN3_5_NAMES = {
    "g_proj.weight": "in_proj_z.weight",
    "a_proj.weight": "in_proj_a.weight",
    "b_proj.weight": "in_proj_b.weight",
    "o_proj.weight": "out_proj.weight",
    "decay.A_log": "A_log",
    "decay.dt_bias": "dt_bias",
    "norm.weight": "norm.weight",
    "conv1d.weight": "conv1d.weight",
}


def rename_to_qwen3_5(read: Read, prefix: str) -> Named:
    """Renames the tensors of a `deltanet_qwen3_5_text` layer to Qwen3.5's names."""
    yield prefix + "in_proj_qkv.weight", torch.cat([read(prefix + f"{name}_proj.weight") for name in "qkv"])
    for ours, theirs in QWEN3_5_NAMES.items():
        yield prefix + theirs, read(prefix + ours)


def rename_from_qwen3_5(read: Read, prefix: str, key_rows: int) -> Named:
    """Undoes `rename_to_qwen3_5`; key_rows: number of key heads * head size."""
    qkv = read(prefix + "in_proj_qkv.weight")
    parts = qkv.split([key_rows, key_rows, len(qkv) - 2 * key_rows])
    for name, part in zip("qkv", parts, strict=True):
        yield prefix + f"{name}_proj.weight", part
    for ours, theirs in QWEN3_5_NAMES.items():
        yield prefix + ours, read(prefix + theirs)


def _trained(name: str, what: str) -> UserError:
    return UserError(
        f"{name}: {what}: the export was trained after it was written; remove its export.json to import it as a "
        "Qwen3.5 model"
    )
