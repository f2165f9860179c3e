"""A session in a file: all that a model remembers of a text, to go on in another process.

The file is a safetensors file, without anything that could be executed. It holds the tokens, the contents of every
layer of the cache, and which model they belong to. It is written completely or not at all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models.cache_bits import BITS, cache_bits_of
from deltanet_hf.models.layers import layer_kinds
from deltanet_hf.models.stateful import check_held
from deltanet_hf.models.unwrapped import unwrapped
from deltanet_hf.safe_write import write_atomically
from deltanet_hf.sessions.model_identity import model_identity

FORMAT = "deltanet-hf session 5"
RESTART = "start a new session in another file"
COMPARED = {"config": "configurations", "weights": "weights"}
INPUTS = ("input_ids", "attention_mask")
Layout = tuple[tuple[int, ...], torch.dtype]


@dataclass
class Session:
    """Tokens and the cache of a model that has read them.

    Attributes:
        input_ids: [B, T] int64, all tokens so far.
        attention_mask: [B, T] int64, 0 at padding.
        cache: after the first tokens; `generate` leaves out the last one, which it has not read.
    """

    input_ids: Tensor
    attention_mask: Tensor
    cache: Cache


def save_session(
    path: str | Path, model: PreTrainedModel, cache: Cache, input_ids: Tensor, attention_mask: Tensor | None = None
) -> None:
    """Write what `model` remembers of `input_ids` to the file `path`, replacing it.

    Args:
        cache: a cache that grows (not a static one), after the first tokens of `input_ids`, at least one.
        input_ids: [B, T], padding included; such as the result of `generate`.
        attention_mask: [B, T], 0 at padding; None for one sequence without padding.

    Raises:
        UserError: several sequences without a mask, a cache of other tokens, sequences or bits, one that has no form in
            a file, or a path that cannot be written.
    """
    model = unwrapped(model)
    if attention_mask is None:
        if len(input_ids) > 1:
            raise UserError(
                f"session: {len(input_ids)} sequences without an attention_mask, which says where padding is; give it, "
                "of ones if there is none"
            )
        attention_mask = torch.ones_like(input_ids)
    tokens = int(cache.get_seq_length())
    if attention_mask.shape != input_ids.shape or not 0 < tokens <= input_ids.shape[1]:
        raise UserError(
            f"session: got a cache of {tokens} tokens, input_ids {list(input_ids.shape)} and an attention mask "
            f"{list(attention_mask.shape)}; give all tokens that the cache has read, and a mask of that shape"
        )
    try:
        check_held(cache, input_ids, cache_bits_of(model))
    except ValueError as error:
        raise UserError(f"session: {error}") from None
    tensors = {"input_ids": input_ids.int(), "attention_mask": attention_mask.to(torch.uint8)}
    for index, layer in enumerate(cache.layers):
        held = as_cache_layer(layer)
        if held.unmovable is not None:
            raise UserError(
                f"session: layer {index} of the cache is a {held.unmovable}, which cannot be saved; use a cache that "
                "grows, such as DynamicCache(config=model.config)"
            )
        own = held.tensors(sliding_window(model.config, index))
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in own.items()}
    saved = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    facts = json.dumps({"tokens": tokens, "cache_bits": cache_bits_of(model)})
    metadata = {"format": FORMAT, "model": json.dumps(model_identity(model)), "cache": facts}
    metadata["checksum"] = _checksum(facts, saved)
    write_atomically(
        Path(path), save(saved, metadata), "free some space; the session that was there before is unchanged"
    )


def load_session(path: str | Path, model: PreTrainedModel) -> Session:
    """Read a session that the same model has saved, in this or in another process.

    The model reads one token, from which the layers of the cache and the shapes of their tensors follow.

    Raises:
        UserError: the file is missing, damaged or no session, or belongs to another model.
    """
    path, model = Path(path), unwrapped(model)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            facts = _facts(path, metadata, model)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read as a session ({one_line(error, 200)}); {RESTART}") from error
    tokens = facts["tokens"]
    input_ids, mask = _inputs(path, tensors, tokens, model)
    cache = _cache_of_one_token(model)
    layouts: dict[str, Layout] = {name: (tuple(input_ids.shape), tensors[name].dtype) for name in INPUTS}
    devices: dict[str, torch.device] = {}
    for index, layer in enumerate(map(as_cache_layer, cache.layers)):
        for name, one in layer.shapes(tokens).items():
            layouts[f"layers.{index}.{name}"] = (len(input_ids), *one.shape), one.dtype
        devices |= {f"layers.{index}.{name}": tensor.device for name, tensor in layer.tensors().items()}
    _check(path, tensors, layouts)
    _check_counts(path, tensors, tokens, model)
    if metadata.get("checksum") != _checksum(metadata["cache"], tensors):
        raise UserError(f"{path}: is damaged, its contents do not give its checksum; {RESTART}")
    for index, layer in enumerate(map(as_cache_layer, cache.layers)):
        prefix = f"layers.{index}."
        names = [name for name in layouts if name.startswith(prefix)]
        device = {name: devices.get(name, devices[names[0]]) for name in names}
        layer.put({name.removeprefix(prefix): tensors[name].to(device[name], copy=True) for name in names}, tokens)
        layer.written = input_ids[:, :tokens].to(model.device)
    return Session(input_ids.to(model.device), mask.to(model.device), cache)


def _checksum(facts: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256, in hex, of the facts about a cache and of the names and bytes of contiguous tensors on the CPU."""
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _facts(path: Path, metadata: dict[str, str], model: PreTrainedModel) -> dict[str, Any]:
    """Number of tokens and bits of a file's cache, of a file that belongs to the model."""
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {metadata.get('format')!r}, expected {FORMAT!r}; it is not a session of this version"
        )
    try:
        saved, facts = json.loads(metadata["model"]), json.loads(metadata["cache"])
        right = isinstance(saved, dict) and type(facts["tokens"]) is int and facts["tokens"] > 0
        right = right and facts["cache_bits"] in BITS
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise UserError(f"{path}: its metadata is damaged; {RESTART}")
    for key, value in model_identity(model).items():
        if saved.get(key) == value:
            continue
        if key == "dtype":
            raise UserError(
                f"{path}: was saved with {saved.get(key)!r} weights, the model has {value}; load it with them"
            )
        raise UserError(
            f"{path}: belongs to another model, the {COMPARED[key]} differ; give the model that saved it, or start a "
            "new session"
        )
    if facts["cache_bits"] != cache_bits_of(model):
        raise UserError(
            f"{path}: was saved with keys and values in {facts['cache_bits']} bits, the model has "
            f"{cache_bits_of(model)}; use --cache-bits {facts['cache_bits']}, or set_cache_bits"
        )
    return facts


def _inputs(path: Path, tensors: dict[str, Tensor], tokens: int, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    if any(name not in tensors or tensors[name].is_floating_point() for name in INPUTS):
        raise UserError(f"{path}: has no input_ids and attention_mask of integers; {RESTART}")
    input_ids, mask = (tensors[name].long() for name in INPUTS)
    vocabulary = int(model.config.get_text_config().vocab_size)
    right = (
        input_ids.dim() == 2 and len(input_ids) > 0 and input_ids.shape[1] >= tokens and mask.shape == input_ids.shape
    )
    if not right or bool(((input_ids < 0) | (input_ids >= vocabulary) | (mask < 0) | (mask > 1)).any()):
        raise UserError(
            f"{path}: input_ids {list(input_ids.shape)} or attention_mask {list(mask.shape)} do not fit {tokens} "
            f"tokens of a vocabulary of {vocabulary}; {RESTART}"
        )
    return input_ids, mask


def _check(path: Path, tensors: dict[str, Tensor], layouts: dict[str, Layout]) -> None:
    """Names, shapes and dtypes are those of the model's cache."""
    if different := sorted(tensors.keys() ^ layouts.keys()):
        what = "missing" if different[0] in layouts else "unknown"
        raise UserError(f"{path}: the tensor {different[0]} is {what}; {RESTART}")
    for name, (shape, dtype) in layouts.items():
        found = tensors[name]
        if tuple(found.shape) != shape or found.dtype != dtype:
            raise UserError(
                f"{path}: {name} is {list(found.shape)} {found.dtype}, expected {list(shape)} {dtype}; {RESTART}"
            )


def _check_counts(path: Path, tensors: dict[str, Tensor], tokens: int, model: PreTrainedModel) -> None:
    """Counts in states are possible ones: kernels take places in memory from them."""
    largest = {
        f"layers.{index}.{name}": most
        for index, kind in layer_kinds(model)
        for name, most in kind.largest_counts().items()
    }
    for name, found in tensors.items():
        most = min(tokens, largest.get(name, tokens))
        if name not in INPUTS and found.dtype == torch.int32 and bool(((found < 0) | (found > most)).any()):
            raise UserError(f"{path}: {name} has counts that are not from 0 to {most}; {RESTART}")


@torch.no_grad()
def _cache_of_one_token(model: PreTrainedModel) -> Cache:
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(token, use_cache=True, **{CACHE: cache})
    return cache
