"""The public-domain text shipped with the package (text/SOURCES.md says what and whence), and how texts begin."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


def shipped_texts() -> list[Path]:
    """Paths of the shipped text files, in a fixed order."""
    return sorted((Path(__file__).parent / "text").glob("*.txt"))


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer itself puts before a text: the begin-of-text token of some families, nothing for others.

    Those that have one may know no text without it: Gemma 3's perplexity doubles.
    """
    return [i for i in tokenizer("")["input_ids"] if i == tokenizer.bos_token_id]


def with_prefix(windows_NT: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Windows that begin the way the model's training documents did."""
    prefix = torch.tensor(prefix_ids(tokenizer), dtype=torch.long).expand(windows_NT.shape[0], -1)
    return torch.cat([prefix, windows_NT], dim=1)
