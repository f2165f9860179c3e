"""Opens a teacher in one pass: its config, its weights, the model that they make, its generation config."""

import contextlib
import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.loading import with_usual_outputs
from deltanet_hf.model_types import PREFIX
from deltanet_hf.models.families import FAMILIES, Family

from .meta_model import attention_implementation, meta_model, tied_names
from .storage.generation_config import generation_config
from .storage.safetensors_folder import Checkpoint, read_json
from .storage.saved_tokenizer import check_saving, load_tokenizer
from .storage.shard_writer import TensorSpec
from .storage.stored_experts import with_joined_experts
from .storage.teacher_source import Source

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QWEN3_5 = ("qwen3_5_text", "qwen3_5")  # the second has a nested text model: beside a vision tower, or for mlx
LAYER = re.compile(r"^model\.layers\.(\d{1,6})\.")
REMEDY = (
    "add or remove weights, or correct the keys of the config for sizes, heads, experts, biases and tie_word_embeddings"
)
LARGEST = sys.float_info.max
LIMITS = {
    "rms_norm_eps": (0.0, 1.0),
    "max_position_embeddings": (2, LARGEST),  # a sequence has a token that is predicted from another
    "rope_theta": (1e-9, LARGEST),
    "factor": (1e-9, LARGEST),  # of the rotary embedding
}  # of numbers that would otherwise end, layers later, in values that are not finite
# Old Llama checkpoints contain the rotary frequencies, which follow from the config.
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Teacher:
    """A supported, complete checkpoint. `model` is on the meta device: it has shapes and no data."""

    source: Source
    config: PreTrainedConfig
    family: Family
    checkpoint: Checkpoint
    model: PreTrainedModel
    dtype: torch.dtype  # dtype of most of its weights
    generation_config: GenerationConfig

    @property
    def name(self) -> str:
        """The folder's or file's name, or the hub id."""
        return self.source.name

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        decoder: Any = self.model.model
        return int(decoder.layers[0].self_attn.head_dim)

    @property
    def tied(self) -> bool:
        return HEAD in tied_names(self.model)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer, from the first use on; UserError if there is none, or it is damaged, or cannot be saved."""
        tokenizer = load_tokenizer(self.folder)
        check_saving(tokenizer, self.folder)  # it is saved after the last layer
        return tokenizer

    def identity(self) -> dict[str, Any]:
        """The name, the config and the weight files, which have to be the same in a resumed run, as a JSON value."""
        config = hashlib.sha256((self.folder / "config.json").read_bytes()).hexdigest()
        names = {"name": self.name, "revision": self.source.revision}
        return {**names, "config": config, "files": self.checkpoint.file_states()}

    def check_tokens(self, ids: Tensor) -> None:
        """Raises UserError if the tokenizer made one of these ids [...] that the embedding does not have."""
        largest, size = int(ids.max()), int(self.config.vocab_size)
        if largest >= size:
            raise UserError(
                f"{self.folder}: the tokenizer makes token {largest} but vocab_size in config.json is {size}; give the "
                "tokenizer that belongs to the teacher"
            )

    def load_weights(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """The model with its weights, in eval mode, without gradients."""
        try:
            with _no_progress_bar():
                model: PreTrainedModel = self.family.model_class.from_pretrained(
                    self.folder,
                    config=with_usual_outputs(self.family.config_class.from_pretrained(self.folder)),
                    dtype=dtype,
                    attn_implementation=attention_implementation(self.config),
                    use_safetensors=True,
                )
            return model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"{self.folder}: the teacher does not fit into the GPU's memory; use --device cpu"
            ) from error
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.folder}: cannot be loaded ({one_line(error, 200)}); check the weights") from error


def open_teacher(source: Source) -> Teacher:
    """Checks a folder and returns the teacher in it; no weights are read but a tied model's head.

    Raises:
        UserError: the family is not supported, a number or the generation config cannot be used, or config and tensors
            contradict each other.
    """
    folder = source.folder
    file = folder / "config.json"
    raw = read_json(file)
    _check_numbers(file, raw)
    family = _check_supported(file, raw)
    checkpoint = with_joined_experts(Checkpoint.open(folder))
    _check_layer_count(file, raw, checkpoint)
    config = _guarded(file, lambda: with_usual_outputs(family.config_class.from_pretrained(folder)))
    if config.tie_word_embeddings and not _same_values(checkpoint, EMBEDDING, HEAD):
        config.tie_word_embeddings = False  # as transformers does
    dtype = _main_dtype(checkpoint)
    model = _guarded(file, lambda: meta_model(family.model_class, config, dtype))
    check_tensors(file, model, checkpoint)
    return Teacher(source, config, family, checkpoint, model, dtype, generation_config(folder, config))


def is_qwen3_5(config: dict[str, Any]) -> bool:
    """Whether the contents of a config.json describe a Qwen3.5 text model."""
    return config.get("model_type") in QWEN3_5


def output_specs(model: PreTrainedModel, dtype: torch.dtype, float32: tuple[str, ...]) -> list[TensorSpec]:
    """Name, shape and dtype of every tensor that a model (on the meta device) saves.

    Numbers are stored in `dtype`, those whose name ends with one of `float32` in float32; indices as they are.
    """
    tied = tied_names(model)
    specs = []
    for name, tensor in model.state_dict().items():
        stored = torch.float32 if name.endswith(float32) else dtype
        if name not in tied:
            specs.append(TensorSpec(name, tuple(tensor.shape), stored if tensor.is_floating_point() else tensor.dtype))
    return specs


def _check_numbers(file: Path, raw: dict[str, Any]) -> None:
    for key, value in _numbers(raw):
        low, high = LIMITS.get(key.rpartition(".")[2], (-LARGEST, LARGEST))
        if not low <= value <= high:  # true of NaN
            raise UserError(f"{file}: key '{key}' is {value}, expected a number from {low:g} to {high:g}; correct it")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with its key; nested keys are separated by dots."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value


def _check_supported(file: Path, raw: dict[str, Any]) -> Family:
    model_type = raw.get("model_type")
    supported = ", ".join(sorted(FAMILIES))
    if not isinstance(model_type, str):
        raise UserError(f"{file}: key 'model_type' is missing; supported model types are {supported}")
    if is_qwen3_5(raw):
        raise UserError(f"{file}: is a Gated DeltaNet model already; `deltanet-hf import` takes it as it is")
    if model_type.startswith(PREFIX):
        raise UserError(f"{file}: model_type '{model_type}' is converted already; give the original teacher")
    if "deltanet" in raw:
        raise UserError(f"{file}: key 'deltanet' belongs to converted models; give the original teacher, or remove it")
    for key in ("vision_config", "audio_config", "text_config"):
        if key in raw:
            raise UserError(
                f"{file}: model_type {model_type!r} is multimodal (key '{key}'); only text models are "
                f"supported: {supported}"
            )
    if model_type not in FAMILIES:
        raise UserError(f"{file}: model_type {model_type!r} is not supported; supported are {supported}")
    if raw.get("quantization_config"):
        raise UserError(f"{file}: key 'quantization_config': the teacher is quantised; save it as bfloat16 first")
    if raw.get("clip_qkv") is not None:
        raise UserError(f"{file}: key 'clip_qkv': converted layers clip no queries, keys and values; remove it")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise UserError(f"{file}: key 'architectures' is {architectures!r}, expected a list of names; correct it")
    family = FAMILIES[model_type]
    if architectures and family.model_name not in architectures:
        raise UserError(
            f"{file}: architectures {architectures} holds no {family.model_name}; only language models can be converted"
        )
    return family


def _check_layer_count(file: Path, raw: dict[str, Any], checkpoint: Checkpoint) -> None:
    layers = {int(match[1]) for name in checkpoint.entries if (match := LAYER.match(name))}
    count, said = max(layers, default=-1) + 1, raw.get("num_hidden_layers")
    if not layers:
        raise UserError(
            f"{checkpoint.files()[0]}: no tensor is called 'model.layers.0.*'; save the whole causal language model"
        )
    if said is not None and said != count:
        raise UserError(
            f"{file}: num_hidden_layers is {said!r} but the weights are those of {count} layers; correct the config or "
            "complete the weights"
        )


def _guarded(file: Path, build: Callable[[], Any]) -> Any:
    """Runs a constructor of transformers and turns its errors, which may be of any type, into UserErrors."""
    try:
        return build()
    except Exception as error:
        raise UserError(
            f"{file}: transformers cannot build the model from it ({one_line(error, 300)}); correct the key"
        ) from error


def _same_values(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors hold the same values; True if one of them is not there."""
    if first not in checkpoint or second not in checkpoint:
        return True
    if checkpoint.entries[first].shape != checkpoint.entries[second].shape:
        return False
    blocks = zip(checkpoint.blocks(first), checkpoint.blocks(second), strict=True)
    return all(torch.equal(one.double(), other.double()) for one, other in blocks)


def _main_dtype(checkpoint: Checkpoint) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for name, entry in checkpoint.entries.items():
        dtype = checkpoint.dtype(name)
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(entry.shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def check_tensors(
    config_file: Path,
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    stored_as: Callable[[str], str] = str,
    alone: bool = True,
) -> None:
    """Raises a UserError unless the checkpoint holds the tensors of `model` (on the meta device) in its shapes.

    Args:
        stored_as: maps the model's name of a tensor to the checkpoint's.
        alone: also refuse tensors that the model does not have.
    """
    expected = {stored_as(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = {stored_as(name) for name in tied_names(model)}
    for name, shape in expected.items():
        if name in checkpoint and checkpoint.entries[name].shape != shape:
            entry = checkpoint.entries[name]
            raise UserError(
                f"{entry.file}: tensor '{name}' has shape {list(entry.shape)} but {config_file.name} needs "
                f"{list(shape)}; {REMEDY}"
            )
    for name in expected:
        if name not in checkpoint and name not in optional:
            raise UserError(f"{checkpoint.files()[0]}: tensor '{name}' is missing from the checkpoint; {REMEDY}")
    for name, entry in checkpoint.entries.items() if alone else ():
        if name not in expected and not DERIVED.search(name):
            raise UserError(
                f"{entry.file}: tensor {name!r} has no place in a {model.config.model_type} model with this "
                f"{config_file.name}; {REMEDY}"
            )


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without transformers' progress bar over weights, which would break the command's own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
