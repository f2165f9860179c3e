"""Tables of rows of `measuring.study.mixer_row` at commit bdedce8a, for readme_tables.py.

There is one table per number of kept layers and budget of tokens, headed by the teacher and by what is not trained. A
line joins the seeds of one run. Behind ± stands the standard error of the measurement, or for several seeds half the
range of their values. Speeds with a dagger are those of a GPU that several runs shared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from measuring.markdown import Column, figure, table

RATE = 1e-3  # of the new layers, which is not mentioned
COLUMNS = {  # key -> header, digits
    "kl": ("KL", 3),
    "wt2": ("WikiText-2", 1),
    "heldwiki": ("Wikipedia", 1),
    "repeat": ("exact repeat", 2),
    "needles_1k": ("needles in 1k, %", 1),
    "pairs_8": ("8 pairs, %", 1),
    "train_tokens_per_s": ("training, tokens/s", 0),
    "decode_ms": ("decoding, ms/token", 1),
    "state_mb": ("MB at 2k", 1),
}

SPEEDS = ("train_tokens_per_s", "decode_ms")
SHARED = " †"  # behind a speed

Rows = Sequence[dict[str, Any]]


def mixers(rows: Rows) -> str:
    """All tables; failed runs are listed below them."""
    measured = [row for row in rows if "error" not in row]
    untrained = [row for row in measured if not row["tokens"]]
    parts: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in measured:
        if row["tokens"]:
            parts.setdefault((len(row["kept"]), -round(row["tokens"] / 1e6)), []).append(row)
    blocks = []
    for (kept, tokens), part in sorted(parts.items()):
        layers = f"{kept} layers softmax" if kept else "All layers converted"
        head = [row for row in untrained if row["mixer"] == "softmax" or len(row["kept"]) == kept]
        blocks.append(f"**{layers}, {-tokens}M tokens**\n\n{_table([*head, *part])}")
    if sharing := sorted({row["runs_at_once"] for row in measured if _shares(row)}):
        blocks.append(f"† {' or '.join(map(str, sharing))} runs shared the GPU.")
    if failed := [f"failed: {row['run']} ({row['error']})" for row in rows if "error" in row]:
        blocks.append("\n".join(failed))
    return "\n\n".join(blocks) or "Nothing has been measured yet."


def _table(rows: Rows) -> str:
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(re.sub(r"-s\d+$", "", row["run"]), []).append(row)
    columns = [Column(header, _cell, (key, digits)) for key, (header, digits) in COLUMNS.items()]
    return table([Column("", _label), *columns], runs.values())


def _label(seeds: Rows) -> str:
    row = seeds[0]
    if not row["tokens"]:
        return row["run"] if row["mixer"] == "softmax" else f"{row['mixer']}, not trained"
    words = [row["mixer"]]
    words += [f"{key}={str(value).lower()}" for key, value in row.get("set", {}).items()]
    words += [f"rate {row['rate']:g}"] if row.get("rate", RATE) != RATE else []
    return ", ".join(words) + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")


def _shares(row: dict[str, Any]) -> bool:
    return row.get("runs_at_once", 1) > 1


def _cell(seeds: Rows, key: str, digits: int) -> str:
    values = [row[key] for row in seeds if key in row]
    if not values:
        return "-"
    error = seeds[0].get(f"{key}_se") if len(values) == 1 else (max(values) - min(values)) / 2
    shared = SHARED if key in SPEEDS and any(map(_shares, seeds)) else ""
    return figure(sum(values) / len(values), error, digits) + shared
