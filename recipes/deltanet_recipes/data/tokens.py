"""Tokenises data sources into files on disk, which later runs with the same settings find by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.data.text_files import plain_suffix
from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import remove, writing
from deltanet_recipes.data.chat import render_chat
from deltanet_recipes.data.decontaminate import Contamination
from deltanet_recipes.data.sources import documents, token_array
from deltanet_recipes.schema_sections import Source

BATCH = 256  # documents that are tokenised in one call


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
    progress: Callable[[str, int], None] = lambda label, tokens: None,
) -> Corpus:
    """Read the corpus of a source from the cache folder, or tokenise the source into it.

    Args:
        separator: token id that ends every document.
        contamination: evaluation texts; documents that share 13 tokens in a row with them are dropped.
        progress: called with the label and the number of tokens so far after each document.

    Raises UserError if the source cannot be read or has no tokens.
    """
    label = source.hub or Path(str(source.path)).name
    folder = cache / _fingerprint(source, tokenizer, separator, contamination)
    if folder.exists() and not _is_intact(folder):
        remove(folder)
    if not (folder / "meta.json").is_file():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        try:
            with writing(folder):
                partial.mkdir(parents=True)
            _build(partial, source, tokenizer, separator, contamination, lambda count: progress(label, count))
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
        label=label,
        weight=source.weight,
        tokens=np.memmap(folder / "tokens.bin", dtype=meta["dtype"], mode="r"),
        scored=scored,
        starts=np.load(folder / "starts.npy"),
        report=meta,
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
    progress: Callable[[int], None],
) -> None:
    vocabulary = max(len(tokenizer), separator + 1)
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    limit = source.max_tokens or np.iinfo(np.int64).max
    starts, scored, total, documents_seen, dropped = [0], [], 0, 0, 0
    with writing(folder), open(folder / "tokens.bin", "wb") as file:  # sources turn their own errors into UserErrors
        for ids, target in _token_documents(source, tokenizer, separator):
            documents_seen += 1
            if contamination is not None and contamination.touches(ids):
                dropped += 1
                continue
            ids, target = ids[: limit - total], None if target is None else target[: limit - total]
            file.write(ids.astype(dtype).tobytes())
            total += len(ids)
            starts.append(total)
            if target is not None:
                scored.append(target)
            progress(total)
            if total >= limit:
                break
    if total == 0:
        raise UserError(f"data source {source.path or source.hub}: no tokens in it (or all were dropped)")
    with writing(folder):
        np.save(folder / "starts.npy", np.array(starts, dtype=np.int64))
        if scored:
            np.save(folder / "scored.npy", np.concatenate(scored))
    meta = {
        "source": source.model_dump(),
        "dtype": dtype.name,
        "tokens": total,
        "documents": len(starts) - 1,
        "documents_read": documents_seen,
        "documents_contaminated": dropped,
        "decontaminated_against": contamination.names if contamination else [],
    }
    with writing(folder):
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _token_documents(
    source: Source, tokenizer: PreTrainedTokenizerBase, separator: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The token ids [n] of each document with its separator, and which of them are scored ([n] bool, or None)."""
    if source.hub is None and plain_suffix(Path(str(source.path))) == ".npy":
        array = token_array(source)
        for odd in (array.min(), array.max()) if array.size else ():
            if not 0 <= int(odd) < len(tokenizer):
                raise UserError(
                    f"{source.path}: id {int(odd)} is outside the vocabulary of {len(tokenizer)}; give ids of the "
                    "student's tokenizer"
                )
        ends = np.flatnonzero(array == separator) + 1
        for piece in np.split(array, ends):
            if piece.size:
                yield piece, None
        return
    prefix = prefix_ids(tokenizer)
    for batch in _batched(documents(source)):
        if source.messages_key is None:
            texts = ["" if text is None else text for text in batch]
            odd = next((text for text in texts if not isinstance(text, str)), None)
            if odd is not None:
                name = source.path or source.hub
                raise UserError(f"{name}: {source.text_key!r} holds a {type(odd).__name__}, not text; set text_key")
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
            for ids in filter(None, encoded):
                yield np.array([*prefix, *ids, separator], dtype=np.int64), None
        else:
            for messages in batch:
                yield render_chat(tokenizer, messages, separator)


def _batched(items: Iterator[Any]) -> Iterator[Sequence[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _fingerprint(
    source: Source, tokenizer: PreTrainedTokenizerBase, separator: int, contamination: Contamination | None
) -> str:
    """A hash of everything that shapes a corpus: source settings and file, tokenizer, separator, evaluation texts."""
    stat = Path(source.path).stat() if source.path else None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        json.dumps(source.model_dump(exclude={"weight"}), sort_keys=True),
        f"{stat.st_size} {stat.st_mtime_ns}" if stat else "",
        backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        str(tokenizer.chat_template) if source.messages_key else "",
        f"{separator} {prefix_ids(tokenizer)}",
        contamination.fingerprint if contamination else "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
