"""The tables of data.json: what became of the documents of each source, and which texts they overlapped with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = {"read": "read", "held_out": "kept for evaluation", "contaminated": "dropped"}


def markdown(reports: list[dict[str, Any]]) -> str:
    """Documents and tokens of each source of text, then the dropped documents by evaluation text."""
    names = [Path(report["source"]["path"] or report["source"]["hub"]).name for report in reports]
    lines = ["| documents (tokens) | " + " | ".join([*COLUMNS.values(), "trained on"]) + " |", "|---|---|---|---|---|"]
    for name, report in zip(names, reports, strict=True):
        cells = [_cell(report[f"documents_{key}"], report[f"tokens_{key}"]) for key in COLUMNS]
        lines.append(f"| {name} | " + " | ".join([*cells, _cell(report["documents"], report["tokens"])]) + " |")
    lines += ["", "| dropped for 13 tokens in a row of | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for text in sorted({text for report in reports for text in report["contaminated_by"]}):
        found = [report["contaminated_by"].get(text, {"documents": 0, "tokens": 0}) for report in reports]
        lines.append(f"| {text} | " + " | ".join(_cell(cell["documents"], cell["tokens"]) for cell in found) + " |")
    return "\n".join(lines)


def _cell(documents: int, tokens: int) -> str:
    return f"{documents:,} ({tokens / 1e6:.2f}M)" if documents else "-"
