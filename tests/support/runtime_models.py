"""Tiny models with a tokenizer that llama.cpp supports, for tests that run other runtimes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deltanet_convert.export.gguf import SCRIPT, find_converter
from deltanet_hf.data import shipped_texts
from support.tiny_export import exportable_model

SPECIAL = ["<pad>", "<bos>", "<eos>"]
VOCABULARY = 192

# llama.cpp identifies a tokenizer's splitting rule by a hash of its output and knows only published tokenizers.
WRAPPER = """
import runpy, sys
sys.path.insert(0, {folder!r})
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = {script!r}  # --no-mtp is understood
runpy.run_path({script!r}, run_name="__main__")
"""


def converter_for_any_tokenizer(folder: Path) -> None:
    """Writes llama.cpp's converter into `folder`, as a script that accepts the tokenizer below."""
    script = find_converter()
    (folder / SCRIPT).write_text(WRAPPER.format(folder=str(script.parent), script=str(script)))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like GPT-2's with few merges; no token ends inside a character."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=list(string.printable[:94]), show_progress=False
    )
    backend.train_from_iterator(
        [shipped_texts()[0].read_text(encoding="utf-8")[:20000].encode("ascii", "ignore").decode()], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def runtime_folder(folder: Path, model_type: str, layers: tuple[int, ...], **changes: Any) -> Path:
    """Saves a random converted model whose sizes every runtime's kernels support."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    exportable_model(model_type, layers, **{**sizes, **changes}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
