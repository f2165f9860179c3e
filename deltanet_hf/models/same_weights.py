"""Compares the weights of two folders tensor by tensor, whatever their shards are."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


def same_weights(first: Path, second: Path) -> bool:
    """Whether two folders hold tensors of the same names and values in safetensors files; dtypes may differ.

    Only two tensors are in memory at a time. A folder without weights, or with damaged ones, is the same as no other.
    """
    try:
        ours, theirs = _places(first), _places(second)
        if not ours or ours.keys() != theirs.keys():
            return False
        return all(_equal(_read(ours[name], name), _read(theirs[name], name)) for name in ours)
    except (OSError, SafetensorError):
        return False


def _places(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            found.update(dict.fromkeys(shard.keys(), file))
    return found


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as shard:
        return shard.get_tensor(name)  # type: ignore[no-any-return]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    wide = torch.promote_types(one.dtype, other.dtype)
    return one.shape == other.shape and torch.equal(one.to(wide), other.to(wide))
