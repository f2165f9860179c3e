"""Tokenises data sources into files on disk, which later runs with the same settings find by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import remove, writing
from deltanet_recipes.data.decontaminate import Contamination
from deltanet_recipes.data.token_documents import JOINED, TokenDocument, fingerprint, join_groups, token_documents
from deltanet_recipes.schema_sections import Source


@dataclass(frozen=True)
class Corpus:
    """A tokenised source of N tokens in D documents, each of which ends with the separator.

    Attributes:
        label: name in messages.
        weight: relative share of the rows that are drawn from this corpus.
        tokens: [N] uint16 or uint32.
        scored: [N] bool, False for tokens that are never learned (the prompts of chats); None if all are learned.
        starts: [D + 1] int64, the first position of each document, and N.
        report: settings and counts, as stored beside the tokens.
    """

    label: str
    weight: float
    tokens: np.ndarray
    scored: np.ndarray | None
    starts: np.ndarray
    report: dict[str, Any]


def load_corpus(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    separator: int,
    cache: Path,
    contamination: Contamination | None = None,
    evaluation: Sequence[dict[str, Any]] = (),
    joined_tokens: int = JOINED,
) -> Corpus:
    """Read the corpus of a source from the cache folder, or tokenise the source into it.

    Args:
        separator: token id that ends every document.
        contamination: evaluation texts; documents that share 13 tokens in a row with them are dropped.
        evaluation: the arrays that `evaluation_arrays` took from this source; documents of their groups are left out.
        joined_tokens: largest number of tokens of documents that are joined (`join_groups`).

    Raises UserError if the source cannot be read or has no tokens.
    """
    folder = cache / fingerprint(source, tokenizer, separator, contamination, joined_tokens)
    if folder.exists() and not _is_intact(folder):
        remove(folder)
    if not (folder / "meta.json").is_file():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        try:
            with writing(folder):
                partial.mkdir(parents=True)
            _build(partial, source, tokenizer, separator, contamination, evaluation, joined_tokens)
            with writing(folder):
                try:
                    partial.rename(folder)
                except OSError:
                    if not (folder / "meta.json").is_file():  # else another process finished the same corpus first
                        raise
        finally:
            remove(partial)
    meta = json.loads((folder / "meta.json").read_text())
    scored = np.load(folder / "scored.npy", mmap_mode="r") if (folder / "scored.npy").is_file() else None
    return Corpus(
        label=source.hub or Path(str(source.path)).name,
        weight=source.weight,
        tokens=np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r"),
        scored=scored,
        starts=np.load(folder / "starts.npy"),
        report={**meta, "source": source.model_dump(mode="json")},  # of this run: another may have had another weight
    )


def _is_intact(folder: Path) -> bool:
    """Whether the folder holds a whole corpus: after a loss of power, files may be shorter than they were written."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        starts, size = np.load(folder / "starts.npy"), (folder / "tokens.bin").stat().st_size
        scored = folder / "scored.npy"
        return (
            len(starts) == meta["documents"] + 1
            and int(starts[-1]) == meta["tokens"]
            and size == meta["tokens"] * np.dtype(meta["dtype"]).itemsize
            and (not scored.is_file() or len(np.load(scored, mmap_mode="r")) == meta["tokens"])
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return False


def _build(
    folder: Path,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    separator: int,
    contamination: Contamination | None,
    evaluation: Sequence[dict[str, Any]],
    joined_tokens: int,
) -> None:
    vocabulary = max(len(tokenizer), separator + 1)
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    limit = source.max_tokens or np.iinfo(np.int64).max
    starts, scored, total = [0], [], 0
    counts, digest = _Counts(), hashlib.sha256()
    training = _for_training(token_documents(source, tokenizer, separator), contamination, evaluation, counts)
    with writing(folder), open(folder / "tokens.bin", "wb") as file:  # sources turn their own errors into UserErrors
        for document in join_groups(training, tokenizer, joined_tokens) if source.join_groups else training:
            ids = document.ids[: limit - total]
            stored = ids.astype(dtype).tobytes()
            file.write(stored)
            digest.update(stored)
            total += len(ids)
            starts.append(total)
            if document.scored is not None:
                scored.append(document.scored[: len(ids)])
            if total >= limit:
                break
    if total == 0:
        name = source.path or source.hub
        raise UserError(f"data source {name}: no text in it, and no chat with a reply (or all were dropped)")
    with writing(folder):
        np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
        if scored:
            np.save(folder / "scored.npy", np.concatenate(scored))
    meta = {
        "source": source.model_dump(),
        "dtype": dtype.name,
        "tokens": total,
        "documents": len(starts) - 1,
        "sha256": digest.hexdigest(),
        **counts.report(),
        "decontaminated_against": contamination.names if contamination else [],
        "evaluation": list(evaluation),
    }
    with writing(folder):
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))


class _Counts:
    """Documents and tokens that were read, kept for evaluation and dropped; the last by the texts that they touch."""

    def __init__(self) -> None:
        self.read, self.held_out, self.contaminated = [0, 0], [0, 0], [0, 0]
        self.by_text: dict[str, list[int]] = {}

    def add(self, count: list[int], document: TokenDocument) -> None:
        count[0] += 1
        count[1] += len(document.ids)

    def report(self) -> dict[str, Any]:
        totals = {"read": self.read, "held_out": self.held_out, "contaminated": self.contaminated}
        return {
            **{f"documents_{name}": documents for name, (documents, _) in totals.items()},
            **{f"tokens_{name}": tokens for name, (_, tokens) in totals.items()},
            "contaminated_by": {
                name: {"documents": documents, "tokens": tokens}
                for name, (documents, tokens) in sorted(self.by_text.items())
            },
        }


def _for_training(
    documents: Iterator[TokenDocument],
    contamination: Contamination | None,
    evaluation: Sequence[dict[str, Any]],
    counts: _Counts,
) -> Iterator[TokenDocument]:
    """The documents that no evaluation array has taken and that share no 13 tokens with an evaluation text."""
    held_out = {group for array in evaluation for group in array["groups"]}
    for document in documents:
        counts.add(counts.read, document)
        if document.group in held_out:
            counts.add(counts.held_out, document)
            continue
        touched = contamination.touched(document.ids) if contamination is not None else []
        if not touched:
            yield document
            continue
        counts.add(counts.contaminated, document)
        for name in touched:
            counts.add(counts.by_text.setdefault(name, [0, 0]), document)
