"""Tokenises the documents of a data source one after another, and joins those that are pieces of one text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.data.text_files import files_in, plain_suffix
from deltanet_hf.errors import UserError
from deltanet_recipes.data.chat import render_chat
from deltanet_recipes.data.decontaminate import Contamination
from deltanet_recipes.data.sources import documents, token_array
from deltanet_recipes.schema_sections import Source

BATCH = 256  # documents that are tokenised in one call
JOINED = 16384  # tokens of a joined document at most, unless rows are longer


@dataclass(frozen=True)
class TokenDocument:
    """A document of n tokens.

    Attributes:
        ids: [n] int64; the last one is the separator.
        scored: [n] bool, which tokens are learned; None if all are.
        group: its value under `group_key`; without this key, a name that no other document has.
        place: its number among the documents of the source.
    """

    ids: np.ndarray
    scored: np.ndarray | None
    group: str
    place: int


def token_documents(source: Source, tokenizer: PreTrainedTokenizerBase, separator: int) -> Iterator[TokenDocument]:
    """The documents of a source.

    Raises UserError if the source cannot be read or holds no text or no chats.
    """
    for place, (ids, scored, group) in enumerate(_all_documents(source, tokenizer, separator)):
        yield TokenDocument(ids, scored, hashlib.sha256(ids.tobytes()).hexdigest() if group is None else group, place)


def join_groups(
    documents: Iterable[TokenDocument], tokenizer: PreTrainedTokenizerBase, joined_tokens: int
) -> Iterator[TokenDocument]:
    """Join texts of one group that follow each other in the source to documents of at most `joined_tokens` tokens."""
    prefix = len(prefix_ids(tokenizer))
    joined: TokenDocument | None = None
    for document in documents:
        if (
            joined is not None
            and joined.group == document.group
            and joined.place == document.place - 1
            and len(joined.ids) + len(document.ids) <= joined_tokens
        ):
            ids = np.concatenate([joined.ids[:-1], document.ids[prefix:]])
            joined = TokenDocument(ids, None, document.group, document.place)
            continue
        if joined is not None:
            yield joined
        joined = document
    if joined is not None:
        yield joined


def fingerprint(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    separator: int,
    contamination: Contamination | None,
    joined_tokens: int = JOINED,
) -> str:
    """A hash of everything that shapes a corpus: source settings and files, tokenizer, separator, evaluation texts."""
    stats = [path.stat() for path in files_in(Path(source.path))] if source.path else []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        json.dumps(source.model_dump(exclude={"weight"}), sort_keys=True),
        " ".join(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats),
        backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        str(tokenizer.chat_template) if source.messages_key else "",
        f"{separator} {prefix_ids(tokenizer)}",
        contamination.fingerprint if contamination else "",
    ]
    if source.join_groups and joined_tokens != JOINED:
        parts.append(str(joined_tokens))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _all_documents(
    source: Source, tokenizer: PreTrainedTokenizerBase, separator: int
) -> Iterator[tuple[np.ndarray, np.ndarray | None, str | None]]:
    """Token ids, scored tokens and group of each document."""
    if source.hub is None and plain_suffix(Path(str(source.path))) == ".npy":
        array = token_array(source)
        for odd in (array.min(), array.max()) if array.size else ():
            if not 0 <= int(odd) < len(tokenizer):
                raise UserError(
                    f"{source.path}: id {int(odd)} is outside the vocabulary of {len(tokenizer)}; give ids of the "
                    "student's tokenizer"
                )
        for piece in np.split(array, np.flatnonzero(array == separator) + 1):
            if piece.size:
                yield piece, None, None
        return
    prefix = prefix_ids(tokenizer)
    stream = documents(source)
    while batch := list(islice(stream, BATCH)):
        if source.messages_key is not None:
            for chat in batch:
                ids, scored = render_chat(tokenizer, chat.content, separator=separator)
                if scored.any():
                    yield ids, scored, chat.group
            continue
        texts = ["" if document.content is None else document.content for document in batch]
        odd = next((text for text in texts if not isinstance(text, str)), None)
        if odd is not None:
            name = source.path or source.hub
            raise UserError(f"{name}: {source.text_key!r} holds a {type(odd).__name__}, not text; set text_key")
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for document, ids in zip(batch, encoded, strict=True):
            if ids:
                yield np.array([*prefix, *ids, separator], dtype=np.int64), None, document.group
