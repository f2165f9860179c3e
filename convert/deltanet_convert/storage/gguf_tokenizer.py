"""The tokenizer of a GGUF file: transformers builds it, and what transformers leaves out is added from the file."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import transformers

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError

WORD = re.compile("[a-z]{4,8}")
WORDS = 100  # of the vocabulary, that a tokenizer is tried on


def read_tokenizer(file: Path, reader: Any) -> Any:
    """The tokenizer of a GGUF file; `reader` is the file's GGUFReader. Damaged files raise errors of many types."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, trust_remote_code=False
    )
    if field_value(reader, "tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer)
    if field_value(reader, "tokenizer.ggml.add_bos_token") and not prefix_ids(tokenizer):
        tokenizer.add_bos_token = True
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path, file: Path) -> None:
    """Writes a tokenizer that was read from `file` into `folder`.

    Raises:
        UserError: loaded from there, it splits words of its own vocabulary or has lost the begin-of-text token. So it
            is with Gemma 3 in transformers 5.17.
    """
    tokenizer.save_pretrained(folder)
    saved: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    words = list(itertools.islice(filter(WORD.fullmatch, saved.get_vocab()), WORDS))
    split = sum(len(saved(word, add_special_tokens=False)["input_ids"]) > 1 for word in words)
    if 2 * split > len(words) or prefix_ids(saved) != prefix_ids(tokenizer):
        raise UserError(
            f"{file}: transformers {transformers.__version__} reads this file's tokenizer wrongly; upgrade "
            "transformers, or give the checkpoint as safetensors"
        )


def field_value(reader: Any, key: str) -> Any:
    """The value of a key of the file's header; None without it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _split_digits(tokenizer: Any) -> None:
    """Splits numbers into digits, which transformers omits when a GGUF file names the pre-tokenizer 'smollm'."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
