"""Takes text out of a source for evaluation: whole groups of documents, of which windows are written as token ids."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.safe_write import write_atomically, writing
from deltanet_recipes.data.decontaminate import Contamination
from deltanet_recipes.data.token_documents import fingerprint, token_documents
from deltanet_recipes.schema_sections import Source


def evaluation_arrays(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    separator: int,
    cache: Path,
    contamination: Contamination | None,
) -> list[dict[str, Any]]:
    """Write the arrays under `evaluation` of a source, unless they are there.

    Args:
        separator: token id that ends every document.
        cache: folder in which the answer is kept.
        contamination: texts that are evaluated otherwise; documents that are chosen by number share nothing with them.

    Returns:
        For each array its `array` (file), `window` and `windows`, its `groups` and the `sha256` of the file.

    Raises UserError if a group is not in the source, or too few documents are long enough.
    """
    if not source.evaluation:
        return []
    record = cache / f"{fingerprint(source, tokenizer, separator, contamination)}.json"
    if record.is_file():
        written: list[dict[str, Any]] = json.loads(record.read_text())
        if all(_sha256(Path(array["array"])) == array["sha256"] for array in written):
            return written
    written = _write(source, _choose(source, tokenizer, separator, contamination), tokenizer)
    write_atomically(record, json.dumps(written, indent=1).encode())
    return written


def _choose(
    source: Source, tokenizer: PreTrainedTokenizerBase, separator: int, contamination: Contamination | None
) -> list[dict[str, np.ndarray]]:
    """For each array, the tokens of each of its groups."""
    named: dict[str, list[np.ndarray]] = {}
    numbers = [array.groups for array in source.evaluation if isinstance(array.groups, int)]
    first: dict[int, dict[str, np.ndarray]] = {}  # window -> the documents that come first in the order, by group
    for array in source.evaluation:
        if isinstance(array.groups, int):
            first[array.window] = {}
        else:
            named |= {group: [] for group in array.groups}
    prefix, total = len(prefix_ids(tokenizer)), 0
    for document in token_documents(source, tokenizer, separator):
        ids, group = document.ids[prefix:], document.group
        if group in named:
            named[group].append(ids[:-1] if source.join_groups else ids)
            continue
        for window, found in first.items():
            if len(ids) <= window or group in found:
                continue
            last = max(found, key=_order) if len(found) == sum(numbers) else None
            if last is not None and _order(last) < _order(group):
                continue
            if contamination is not None and contamination.touched(document.ids):
                continue
            if last is not None:
                del found[last]
            found[group] = ids[:window]
        total += len(document.ids)
        if source.max_tokens is not None and total >= source.max_tokens:
            break
    chosen: list[dict[str, np.ndarray]] = []
    for array in source.evaluation:
        if isinstance(array.groups, int):
            free = [group for group in first[array.window] if not any(group in groups for groups in chosen)]
            picked = sorted(free, key=_order)[: array.groups]
            if len(picked) < array.groups:
                raise UserError(
                    f"data.sources.evaluation: {array.array}: only {len(picked)} documents of "
                    f"{source.path or source.hub} have {array.window:,} tokens; lower groups or window"
                )
            chosen.append({group: first[array.window][group] for group in picked})
            continue
        absent = [group for group in array.groups if not named[group]]
        if absent:
            raise UserError(
                f"data.sources.evaluation: {array.array}: no document of {source.path or source.hub} has "
                f"{source.group_key} {', '.join(absent)}"
            )
        chosen.append({group: np.concatenate(named[group]) for group in array.groups})
    return chosen


def _write(
    source: Source, chosen: list[dict[str, np.ndarray]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    written = []
    for array, groups in zip(source.evaluation, chosen, strict=True):
        windows = np.concatenate([ids[: len(ids) // array.window * array.window] for ids in groups.values()])
        buffer, path = io.BytesIO(), Path(array.array)
        np.save(buffer, windows.astype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())
        written.append(
            {
                "array": array.array,
                "window": array.window,
                "windows": len(windows) // array.window,
                "groups": list(groups),
                "sha256": _sha256(path),
            }
        )
    return written


def _order(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
