"""The table of `python -m measuring.benchmarks.vllm_throughput`, for readme_tables.py."""

from __future__ import annotations

from pathlib import Path

from measuring.markdown import Column, figure, table
from measuring.rows import Row, RowFile

NAMES = {"teacher": "teacher", "windows4bit": "a quarter of the layers whole", "heads10": "a tenth of the heads whole"}


def vllm(path: Path) -> str:
    """A line per shape, kind of model, prompt length and number of sequences."""
    rows = [row for row in RowFile(path, head={}).rows() if "error" not in row]
    columns = [
        Column("shape", lambda row: row["shape"]),
        Column("model", lambda row: NAMES[row["kind"]]),
        Column("sequences x tokens", lambda row: f"{row['sequences']} x {row['tokens']:,}"),
        Column("prompts, s", lambda row: figure(row.get("prompts_seconds"), digits=2)),
        Column("step, ms", lambda row: f"{row['step_ms']:.1f}"),
        Column("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        Column("fit", lambda row: f"{row['fits']:,}"),
    ]
    return table(columns, sorted(rows, key=_order))


def served(path: Path) -> str:
    """A line per prompt length and number of sequences, with the figures of the teacher and of the converted model."""
    rows = [row for row in RowFile(path, head={}).rows() if row.get("kv_cache_dtype") == "auto"]
    points = sorted({(row["tokens"], row["sequences"]) for row in rows})

    def both(point: tuple[int, int], key: str, digits: int) -> str:
        values = {row["model"]: row[key] for row in rows if (row["tokens"], row["sequences"]) == point}
        return f"{values['teacher']:,.{digits}f} / {values['student']:,.{digits}f}"

    columns = [
        Column("sequences x tokens: original / converted", lambda point: f"{point[1]} x {point[0]:,}"),
        Column("prompts, s", both, ("prompts_seconds", 2)),
        Column("step, ms", both, ("step_ms", 1)),
        Column("tokens/s", both, ("tokens_per_second", 0)),
        Column("sequences that fit", both, ("fits", 0)),
        Column("MB of a sequence", both, ("page_mb", 0)),
    ]
    return table(columns, points)


def _order(row: Row) -> tuple[str, int, int, int]:
    return row["shape"], row["tokens"], row["sequences"], list(NAMES).index(row["kind"])
