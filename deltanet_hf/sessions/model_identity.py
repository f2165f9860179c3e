"""Which model a session belongs to: a hash of its configuration and one of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deltanet_hf.models.cache_bits import KEY_ORDER
from deltanet_hf.models.layers import layer_kinds

SAMPLED = 64  # elements per tensor that are hashed one by one
PART = 2**24  # elements that are summed at once
VOLATILE = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of a configuration that say nothing about what the model computes."""


@torch.no_grad()
def model_identity(model: PreTrainedModel) -> dict[str, str]:
    """Hashes that are equal for the same model on every device and in every process.

    Every byte of the weights counts, in a sum per tensor, which takes about as long as copying the weights; some
    elements of each tensor count with their places; so do the adapters of PEFT, and which are at work. It tells models
    apart and is no protection against forgery.

    Returns:
        `config`, `dtype` (the model's) and `weights`; the first and the last are SHA-256 in hex.
    """
    settings = {key: value for key, value in model.config.to_diff_dict().items() if key not in VOLATILE}
    if "deltanet" in settings:  # a session's file has the bits of its cache
        settings["deltanet"] = {key: value for key, value in settings["deltanet"].items() if key != "cache_bits"}
    if getattr(model, "is_restricted", False):  # windows that its configuration does not have
        branches = [part for _, kind in layer_kinds(model) for part in kind.branches.items()]
        settings["windows"] = [(name, str(getattr(branch, "settings", None))) for name, branch in branches]
    config = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    weights, sums = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        sums.append(_checked(parameter.detach()).to(model.device))
    for name, module in model.named_modules():
        if not getattr(module, "disable_adapters", True):  # a layer of PEFT whose adapters are at work
            at_work, factors = list(module.active_adapters), getattr(module, "scaling", {})
            weights.update(f"{name} {[(adapter, factors.get(adapter)) for adapter in at_work]}".encode())
    for name, order in sorted(model.named_buffers()):
        if name.endswith(KEY_ORDER):  # a sum says nothing of an order
            weights.update(name.encode() + order.cpu().numpy().tobytes())
    if sums:
        weights.update(torch.cat(sums).cpu().numpy().tobytes())
    return {"config": config.hexdigest(), "dtype": str(model.dtype).split(".")[-1], "weights": weights.hexdigest()}


def _checked(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers, and some of its elements: int64 [1 + SAMPLED] or fewer."""
    if tensor.is_meta:  # offloaded
        return torch.zeros(0, dtype=torch.int64)
    integers: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(integers[tensor.itemsize]).flatten()
    step = max(1, bits.numel() // SAMPLED)
    sums = [part.sum(dtype=torch.int64)[None] for part in bits.split(PART)]  # the sum of a part makes a copy in int64
    return torch.cat([sum(sums, torch.zeros(1, dtype=torch.int64, device=bits.device)), bits[::step][:SAMPLED].long()])
