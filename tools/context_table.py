"""The table of `measuring.study.context`'s results file, for readme_tables.py."""

from __future__ import annotations

from pathlib import Path

from measuring.markdown import Column, table
from measuring.rows import Row, RowFile
from measuring.study.far_needles import KINDS

LENGTHS = ("8k", "16k", "32k")
LABELS = {  # of the rows that are shown, in their order
    "teacher": "teacher",
    "teacher, YaRN": "teacher with YaRN",
    "teacher, YaRN, trained": "the same in 4 bits, trained",
    "converted, as it is": "converted without `--context`, before training",
    "converted, cut": "`--context 32k --positions cut`, 16 bits, before training",
    "converted, yarn": "`--context 32k`, before training",
    "trained, yarn": "the same, trained",
}


def context_rows(path: Path) -> dict[str, Row]:
    """The rows of a results file by model."""
    return {row["model"]: row for row in RowFile(path, head={}).rows()}


def context(path: Path) -> str:
    """A line per model: its cache at the greatest length, needles of each kind and nats at all lengths."""
    rows = context_rows(path)
    columns = [
        Column("", lambda model: LABELS[model]),
        Column("MB at 32k", lambda model: f"{rows[model]['MB_32k']:.0f}"),
        *(
            Column(f"needles in {length}, %", lambda model, of: _needles(rows[model], of), (length,))
            for length in LENGTHS
        ),
        Column(
            f"nats at {' / '.join(LENGTHS)}",
            lambda model: " / ".join(f"{rows[model][f'nats_{n}']:.2f}" for n in LENGTHS),
        ),
    ]
    return table(columns, LABELS)


def _needles(row: Row, length: str) -> str:
    return " / ".join(f"{100 * row[f'{kind}_{length}']:.0f}" for kind in KINDS)
