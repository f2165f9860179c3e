"""The tables of data.json: what became of the documents of each source, and which texts they overlapped with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring.markdown import Column, table

COLUMNS = {"_read": "read", "_held_out": "kept for evaluation", "_contaminated": "dropped", "": "trained on"}


def data(path: Path) -> str:
    """Documents and tokens of each source of text, then the dropped documents by evaluation text."""
    reports: list[dict[str, Any]] = json.loads(path.read_text())
    columns = [Column("documents (tokens)", _name)]
    columns += [Column(title, _counts, (key,)) for key, title in COLUMNS.items()]
    dropped = [Column("dropped for 13 tokens in a row of", str)]
    dropped += [Column(_name(report), _overlaps, (report["contaminated_by"],)) for report in reports]
    texts = sorted({text for report in reports for text in report["contaminated_by"]})
    return f"{table(columns, reports)}\n\n{table(dropped, texts)}"


def _name(report: dict[str, Any]) -> str:
    return Path(report["source"]["path"] or report["source"]["hub"]).name


def _counts(report: dict[str, Any], key: str) -> str:
    return _cell(report[f"documents{key}"], report[f"tokens{key}"])


def _overlaps(text: str, overlaps: dict[str, dict[str, int]]) -> str:
    return _cell(**overlaps.get(text, {"documents": 0, "tokens": 0}))


def _cell(documents: int, tokens: int) -> str:
    return f"{documents:,} ({tokens / 1e6:.2f}M)" if documents else "-"
