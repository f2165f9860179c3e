"""The table of `measuring.benchmarks.large_models`'s results file, for readme_tables.py."""

from __future__ import annotations

import json
from pathlib import Path

from measuring.markdown import Column, figure, table
from measuring.rows import Row

COLUMNS = [
    Column("model, stage", lambda row: f"{row['shape']}, {row['stage']}"),
    Column("GPUs", lambda row: f"{row['gpus']} {_chip(row)}"),
    Column("tokens per row, step", lambda row: f"{row['rows']:,}, {row['batch_tokens']:,}"),
    Column("steps", lambda row: str(row["steps"])),
    Column("tokens/s", lambda row: f"{row['tokens_per_s']:,}"),
    Column("share of peak", lambda row: f"{row['share_of_peak']:.0%}"),
    Column("GiB of each GPU", lambda row: figure(row["memory_gib"])),
    Column("expected GiB", lambda row: figure(row["planned_gib"])),
]


def training(path: Path) -> str:
    """A line per stage that was timed, small models first."""
    rows: list[Row] = [row for row in json.loads(path.read_text()) if "tokens_per_s" in row]
    return table(COLUMNS, sorted(rows, key=lambda row: (int(row["shape"].rstrip("MB")), row["gpus"])))


def _chip(row: Row) -> str:
    """`H100` of `NVIDIA H100 80GB HBM3`."""
    return str(row["device"].split()[1])
