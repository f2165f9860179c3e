"""Writes a GGUF file's model as a folder with safetensors weights; a block of rows is in memory at a time.

transformers reads the config. The weights have the values that it would give them: each tensor is dequantised in
float32 and then rounded, and what llama.cpp changed in it is undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.models.families import FAMILIES
from deltanet_kernels.installed_versions import require

from ..meta_model import meta_model, tied_names
from .gguf_tokenizer import field_value, read_tokenizer, save_tokenizer
from .safetensors_folder import BLOCK_ELEMENTS
from .shard_writer import ShardWriter, TensorSpec, plan_layout

SHARD_SIZE = 5 * 10**9  # bytes
NOT_WEIGHTS = ("rope_freqs.", "rope_factors_")  # beginnings of names of tensors that follow from the config
PERMUTED = ("llama",)  # architectures in which the two rows of a rotary pair are adjacent in q and k
WITH_ONE = ("gemma2", "gemma3")  # architectures whose norms are stored as w + 1


@dataclass(frozen=True)
class GgufTeacher:
    """The model in a GGUF file whose header was read; the weights are still in the file."""

    file: Path
    config: Any
    tokenizer: Any
    model: PreTrainedModel  # on the meta device
    architecture: str  # llama.cpp's name of the family
    tensors: dict[str, Any]  # the tensors of the file by their names in transformers

    @classmethod
    def open(cls, file: Path, dtype: torch.dtype) -> GgufTeacher:
        """Reads the header; `dtype` is that of the weights to be written.

        Raises:
            UserError: the file is damaged or of a family that is not supported, or its tensors do not fit its config.
            ModuleNotFoundError: the package `gguf` is missing.
            TooOldError: it is too old.
        """
        require("gguf")
        from gguf import GGUFReader  # without it, transformers raises an error that does not name the extra
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            reader = GGUFReader(file)
            tokenizer = read_tokenizer(file, reader)
            architecture = str(field_value(reader, "general.architecture"))
        except Exception as error:  # a damaged file raises errors of many types
            raise UserError(
                f"{file}: transformers cannot load this GGUF file ({one_line(error, 300)}); give safetensors"
            ) from error
        if config.model_type not in FAMILIES:
            raise UserError(
                f"{file}: model_type {config.model_type!r} is not supported; supported are "
                f"{', '.join(sorted(FAMILIES))}"
            )
        model = meta_model(FAMILIES[config.model_type].model_class, config, dtype)
        if getattr(config, "num_experts_per_tok", None):
            raise UserError(f"{file}: mixtures of experts are not read from GGUF files; give safetensors")
        tensors = _matched(file, model, reader.tensors, architecture)
        return cls(file, config, tokenizer, model, architecture, tensors)

    def write(self, folder: Path) -> None:
        """Writes config, tokenizer and weights into `folder`."""
        dtype = self.model.dtype
        self.config.architectures, self.config.dtype = [type(self.model).__name__], dtype
        self.config.save_pretrained(folder)
        if self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder, self.file)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        layout = plan_layout([TensorSpec(name, shapes[name], dtype) for name in self.tensors], SHARD_SIZE)
        writer = ShardWriter(folder, layout)
        writer.prepare()
        for name in self.tensors:
            writer.write(name, self._blocks(name))
        writer.finish()

    def _blocks(self, name: str) -> Iterator[Tensor]:
        """Yields a tensor's elements in order, as float32 blocks of rows.

        The file is read, not mapped: the pages of a memory map count as resident memory until it is closed.
        """
        from gguf import dequantize

        tensor = self.tensors[name]
        rows, width = np.atleast_2d(tensor.data).shape
        order = self._order(name, rows)

        def read(first: int, count: int) -> Any:
            begin = tensor.data_offset + first * width * tensor.data.itemsize
            return np.fromfile(self.file, tensor.data.dtype, count * width, offset=begin).reshape(count, width)

        ordered = None if order is None else read(0, rows)[order]
        per_block = max(1, BLOCK_ELEMENTS * rows // max(1, int(tensor.n_elements)))
        for first in range(0, rows, per_block):
            count = min(per_block, rows - first)
            try:
                part = read(first, count) if ordered is None else ordered[first : first + count]
                values = dequantize(part, tensor.tensor_type)
            except (ValueError, NotImplementedError) as error:
                raise UserError(
                    f"{self.file}: tensor '{tensor.name}' cannot be dequantised ({one_line(error, 200)}); "
                    "give safetensors"
                ) from error
            if self.architecture in WITH_ONE and "norm.weight" in tensor.name:
                values = values - 1
            yield torch.from_numpy(values)

    def _order(self, name: str, rows: int) -> Any:
        """The rows of the file's tensor in the order of transformers; None if it is the same."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        module = name.split(".")[-2]
        if self.architecture not in PERMUTED or module not in heads:
            return None
        return np.arange(rows).reshape(heads[module], -1, 2).swapaxes(1, 2).reshape(-1)


def _matched(file: Path, model: PreTrainedModel, tensors: Any, architecture: str) -> dict[str, Any]:
    """The tensors of a file by the names that transformers' model has for them."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, int(model.config.num_hidden_layers))
    left = {tensor.name: tensor for tensor in tensors if not tensor.name.startswith(NOT_WEIGHTS)}
    found = {}
    for name, parameter in model.state_dict().items():
        if name in tied_names(model):
            continue
        module, _, kind = name.rpartition(".")
        stored = f"{names.get_name(module)}.{kind}"
        if stored not in left:
            raise UserError(f"{file}: tensor '{stored}' ({name}) is missing; download the file again")
        tensor = found[name] = left.pop(stored)
        shape = [int(size) for size in tensor.shape[::-1]]  # llama.cpp lists sizes in the other order
        if shape != list(parameter.shape):
            raise UserError(f"{file}: tensor '{stored}' has shape {shape}, its config needs {list(parameter.shape)}")
    if left:
        raise UserError(
            f"{file}: tensor '{min(left)}' has no place in a {model.config.model_type} model; give safetensors"
        )
    return found
