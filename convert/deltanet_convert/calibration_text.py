"""Reads calibration text, cuts it into sequences and splits off a held-out part."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from deltanet_hf.data import prefix_ids, shipped_texts, with_prefix
from deltanet_hf.data.text_files import TextFile
from deltanet_hf.errors import UserError, one_line
from deltanet_hf.models.layers import LayerTable

from .options import FEWEST_TOKENS
from .teacher_model import Teacher

SEQUENCE_LENGTH = 512
LONG_SEQUENCE_LENGTH = 2048  # where there are windows, which miss nothing in short sequences
HELD_OUT_TOKENS = 4096  # at most, and never more than the calibration tokens
HELD_OUT_SHARE = 0.2  # share of the text, at its end, from which held-out sequences are drawn
SHIPPED_TEXT = "the text shipped with deltanet-hf"  # name of the calibration text in conversion.json
CHARS_PER_TOKEN = 24  # characters read per token: more than any tokenizer uses, far less than a corpus has


@dataclass(frozen=True)
class CalibrationText:
    """Token ids [n, T] int64 for calibration and, from another part of the text, for measurement."""

    calibration: Tensor
    held_out: Tensor
    source: str
    sha256: str  # hash of the characters that were read


def sequence_length(table: LayerTable, config: PreTrainedConfig) -> int:
    """Tokens per calibration sequence of a conversion into the layers of `table`."""
    windows = any(getattr(kind.recurrent or kind.settings, "window", 0) for kind in table.kinds.values())
    return min(LONG_SEQUENCE_LENGTH if windows else SEQUENCE_LENGTH, int(config.max_position_embeddings))


def calibration_text(teacher: Teacher, file: Path | None, tokens: int, seed: int, longest: int) -> CalibrationText:
    """Reads the calibration text with the teacher's tokenizer; without a `file`, the text that deltanet-hf ships.

    Args:
        tokens, seed, longest: see `tokenise`.

    Raises:
        UserError: the text cannot be read or is too short, or the tokenizer has more tokens than the embedding.
    """
    if file is None:
        documents = [path.read_text(encoding="utf-8") for path in shipped_texts()]
        source = SHIPPED_TEXT
    else:
        documents, source = read_text(file, 2 * tokens), str(file)
    text = tokenise(documents, teacher.tokenizer, tokens, seed, source, longest)
    teacher.check_tokens(text.calibration)
    teacher.check_tokens(text.held_out)
    return text


def read_text(path: Path, needed_tokens: int) -> list[str]:
    """Reads the documents of a file in order, until they suffice for `needed_tokens` tokens.

    The formats are those of `deltanet_hf.data.text_files`.

    Raises:
        UserError: the file is missing, of another kind, unreadable or empty.
    """
    budget = max(1_000_000, CHARS_PER_TOKEN * needed_tokens)
    return list(TextFile(path, option="--text").documents(budget))


def tokenise(
    documents: list[str], tokenizer: Any, calibration_tokens: int, seed: int, source: str, longest: int
) -> CalibrationText:
    """Cuts the documents into sequences and draws calibration and held-out sequences with `seed`.

    A sequence has `min(longest, calibration_tokens)` tokens. It begins with the begin-of-text token if the
    tokenizer adds one, because models trained with that token depend on it. The held-out sequences come from the last
    fifth of the text, the calibration sequences from the rest.

    Raises:
        UserError: the text is too short for `calibration_tokens`.
    """
    length = min(longest, calibration_tokens)
    ids: list[int] = []
    end = tokenizer.eos_token_id
    for document in documents:
        try:
            ids.extend(tokenizer(document, add_special_tokens=False)["input_ids"])
        except Exception as error:  # of any type, by the tokenizers library
            raise UserError(
                f"--text {source}: the teacher's tokenizer cannot read it ({one_line(error, 200)}); correct "
                "tokenizer.json, or give another text"
            ) from error
        if end is not None:
            ids.append(end)
    wanted, held = -(-calibration_tokens // length), min(HELD_OUT_TOKENS, calibration_tokens) // length
    cut = length - len(prefix_ids(tokenizer))
    blocks = torch.tensor(ids[: len(ids) // cut * cut], dtype=torch.int64).view(-1, cut)
    blocks = with_prefix(blocks, tokenizer)
    first_held = min(len(blocks) - 1, int(len(blocks) * (1 - HELD_OUT_SHARE)))
    if first_held < wanted:
        most = first_held * length if first_held > 0 else len(ids) // 2
        smaller = f", or use at most {most}" if most >= FEWEST_TOKENS else ""
        raise UserError(
            f"--text {source}: {len(ids)} tokens are too few for --calibration-tokens {calibration_tokens} and a "
            f"held-out fifth; give more text{smaller}"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(first_held, generator=generator)[:wanted]
    measured = first_held + torch.randperm(len(blocks) - first_held, generator=generator)[:held]
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return CalibrationText(blocks[chosen], blocks[measured], source, digest)
