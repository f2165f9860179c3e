"""The table of `python -m measuring.benchmarks.vllm_throughput`, for readme_tables.py."""

from __future__ import annotations

from pathlib import Path

from measuring.markdown import Column, table
from measuring.rows import Row, RowFile

NAMES = {"teacher": "teacher", "windows4bit": "a quarter of the layers whole", "heads10": "a tenth of the heads whole"}


def vllm(path: Path) -> str:
    """A line per shape, kind of model, prompt length and number of sequences."""
    rows = [row for row in RowFile(path, head={}).rows() if "error" not in row]
    columns = [
        Column("shape", lambda row: row["shape"]),
        Column("model", lambda row: NAMES[row["kind"]]),
        Column("sequences x tokens", lambda row: f"{row['sequences']} x {row['tokens']:,}"),
        Column("prompts, s", lambda row: f"{row['prompts_seconds']:.2f}"),
        Column("step, ms", lambda row: f"{row['step_ms']:.1f}"),
        Column("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        Column("fit", lambda row: f"{row['fits']:,}"),
    ]
    return table(columns, sorted(rows, key=_order))


def _order(row: Row) -> tuple[str, int, int, int]:
    return row["shape"], row["tokens"], row["sequences"], list(NAMES).index(row["kind"])
