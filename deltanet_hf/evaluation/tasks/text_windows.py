"""Reads evaluation texts and cuts them into windows of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data.text_files import TextFile
from deltanet_hf.errors import UserError


def token_ids(path: Path, tokenizer: PreTrainedTokenizerBase, needed: int, wanted: int) -> np.ndarray:
    """At least `wanted` token ids [n] int64 of a text file, or all, its documents joined by the end-of-text token.

    The file is of a format of `deltanet_hf.data.text_files`, or a .npy file with token ids of the same tokenizer.
    Raises UserError if it cannot be read or has fewer than `needed` tokens.
    """
    if path.suffix == ".npy":
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        ids = np.load(path).astype(np.int64)
        if ids.ndim != 1 or ids.size == 0 or ids.max() >= len(tokenizer):
            raise UserError(f"{path}: expected a 1-D array of token ids below {len(tokenizer)}")
    else:
        ids = encode_documents(TextFile(path, option="--text").documents(), tokenizer, wanted)
    if ids.size < needed:
        raise UserError(f"{path}: {ids.size} tokens, but {needed} are needed; give a longer text or fewer windows")
    return ids


def encode_documents(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, needed: int) -> np.ndarray:
    """Token ids [n] int64 of the documents, joined by the end-of-text token.

    Documents after the one that completes `needed` tokens are left out.
    """
    ids: list[int] = []
    for document in documents:
        if ids and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= needed:
            break
    return np.asarray(ids, dtype=np.int64)


def windows(ids: np.ndarray, length: int, count: int, spread: bool = False) -> Tensor:
    """`count` windows [count, length] int64 of a text, without overlap; fewer if the text is too short.

    Args:
        spread: evenly over the text, and not the first.
    """
    available = ids.size // length
    count = min(count, available)
    chosen = np.linspace(0, available - 1, count).round().astype(int) if spread else np.arange(count)
    return torch.from_numpy(ids[: available * length].reshape(available, length)[chosen])


def wikitext_texts(data: Path | None) -> dict[str, str]:
    """WikiText-2 as distributed (`wikitext2`), with spaces and marks around punctuation, and by lm-eval's detokeniser
    (`wikitext2_clean`).

    Both come from the file `wikitext2/wiki.test.tokens` of the folder `data`; without it, the result is empty. They
    hold the same words, so their difference shows how a model that was trained on clean text copes with the format.
    """
    path = None if data is None else data / "wikitext2" / "wiki.test.tokens"
    if path is None or not path.is_file():
        return {}
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    raw = path.read_text(encoding="utf-8")
    # Per line, because the detokeniser would otherwise pair quotation marks of different paragraphs.
    clean = "\n".join(wikitext_detokenizer({"page": line}) for line in raw.splitlines())
    return {"wikitext2": raw, "wikitext2_clean": clean}
