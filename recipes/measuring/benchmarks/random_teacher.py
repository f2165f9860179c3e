"""Writes a complete Llama checkpoint of random weights, for benchmarks that need a shape and no knowledge."""

from __future__ import annotations

import shutil
import string
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deltanet_convert.meta_model import meta_model
from deltanet_convert.storage.shard_writer import ShardWriter, plan_layout
from deltanet_convert.teacher_model import output_specs

PIECE = 2**25  # values that are in memory at once
DEVIATION = 0.02


def write_teacher(folder: Path, config: LlamaConfig, device: torch.device | str = "cpu") -> None:
    """Write model and tokenizer shard by shard into `folder`, unless the same checkpoint is there already.

    The weights are normally distributed in bfloat16, norms are 1; tied output matrices are left out. The seed is fixed,
    so that two calls on one kind of device write the same.

    Args:
        device: where the random numbers are drawn; a GPU takes seconds for an 8B model, a CPU minutes.
    """
    config.dtype, config.architectures = torch.bfloat16, ["LlamaForCausalLM"]
    done = folder / "complete"
    request = config.to_json_string()
    if done.is_file() and done.read_text() == request:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    specs = output_specs(meta_model(LlamaForCausalLM, config, torch.bfloat16), torch.bfloat16, ())
    writer = ShardWriter(folder, plan_layout(specs, 2 * 10**9))
    writer.prepare()
    generator = torch.Generator(device).manual_seed(0)
    for spec in specs:
        norm = spec.name.endswith("norm.weight")
        writer.write(spec.name, [torch.ones(spec.shape)] if norm else _normal(spec.numel, generator))
    writer.finish()
    config.save_pretrained(folder)
    random_tokenizer(config.vocab_size).save_pretrained(folder)
    done.write_text(request)


def _normal(count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Random values [count] bfloat16 on the CPU, in pieces."""
    for begin in range(0, count, PIECE):
        values = torch.randn(min(PIECE, count - begin), generator=generator, device=generator.device)
        yield values.mul_(DEVIATION).bfloat16().cpu()


def random_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable character, and names for the other ids of the vocabulary."""
    tokens = ["<unk>", "<eos>", *string.printable]
    tokens = [*tokens, *(f"<{index}>" for index in range(len(tokens), vocabulary))][:vocabulary]
    ids = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
