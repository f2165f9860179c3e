"""Presents the experts' weights of a checkpoint as transformers' modules hold them: one tensor [experts, ...] each.

Most checkpoints store a matrix per expert, and some use other names than the modules. Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from deltanet_hf.errors import UserError

from .safetensors_folder import Checkpoint, JoinedEntry, StoredTensor
from .safetensors_header import DOWNLOAD_AGAIN, TensorEntry

MATRIX = re.compile(
    r"^(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj|w[123])\.weight$"
)
JOINED = {  # per tensor of the modules, the matrices of one expert that it holds one below the other
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
RENAMED = {
    ".block_sparse_moe.gate.weight": ".mlp.gate.weight",  # Mixtral
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",  # Granite
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
}


def with_joined_experts(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names of transformers' modules; one without experts stays as it is.

    Raises:
        UserError: an expert lacks a matrix, or its matrices have other shapes than those of the others.
    """
    entries: dict[str, StoredTensor] = {}
    experts: dict[str, dict[int, dict[str, TensorEntry]]] = {}  # by layer, number and name within the expert
    for name, entry in checkpoint.entries.items():
        if isinstance(entry, TensorEntry) and (found := MATRIX.match(name)):
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = entry
            continue
        for stored, own in RENAMED.items():
            name = name.removesuffix(stored) + own if name.endswith(stored) else name
        entries[name] = entry
    for layer, matrices in experts.items():
        prefix = f"{layer}.mlp.experts."
        entries |= {prefix + name: _joined(prefix + name, matrices, *JOINED[name]) for name in JOINED}
    return Checkpoint(checkpoint.folder, entries)


def _joined(name: str, experts: Mapping[int, Mapping[str, TensorEntry]], *names: tuple[str, ...]) -> JoinedEntry:
    some = next(iter(experts[min(experts)].values()))
    known = next((group for group in names if set(group) & set(experts[min(experts)])), names[0])
    parts = tuple(experts[i][part] for i in range(len(experts)) for part in known if part in experts.get(i, ()))
    if len(parts) != len(known) * len(experts):
        raise UserError(
            f"{some.file}: '{name}': an expert between 0 and {max(experts)} lacks a matrix; {DOWNLOAD_AGAIN}"
        )
    if any(len(part.shape) != 2 or part.shape != parts[i % len(known)].shape for i, part in enumerate(parts)):
        raise UserError(f"{some.file}: '{name}': the experts' matrices differ in shape; {DOWNLOAD_AGAIN}")
    rows = sum(part.shape[0] for part in parts[: len(known)])
    return JoinedEntry(name, (len(experts), rows, parts[0].shape[1]), parts)
