"""The public-domain text that ships with the package (listed in text/SOURCES.md), and the tokens that begin a text."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


def shipped_texts() -> list[Path]:
    """Paths of the text files that ship with the package, sorted by name."""
    return sorted((Path(__file__).parent / "text").glob("*.txt"))


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids that the tokenizer puts before a text: the begin-of-text token, or none in some families.

    A model that was trained with this token may depend on it; without it, the perplexity of Gemma 3 doubles.
    """
    return [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id]


def with_prefix(windows_NT: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Windows [N, T] int64, each preceded by the K tokens of `prefix_ids`: [N, K + T] int64."""
    prefix = torch.tensor(prefix_ids(tokenizer), dtype=torch.long).expand(windows_NT.shape[0], -1)
    return torch.cat([prefix, windows_NT], dim=1)
