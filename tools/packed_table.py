"""The table of attention to packed keys and values, from the rows of `python -m measuring.kernels packed_attention`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring.markdown import Column, figure, table

Times = dict[int, float]  # bits -> microseconds


def packed(path: Path) -> str:
    """One line per shape: microseconds in 16, 8 and 4 bits, and how many times faster the latter are than 16."""
    times: dict[tuple[int, ...], Times] = {}
    for row in json.loads(path.read_text())["rows"]:
        if "us" in row and not row.get("key_order"):
            times.setdefault(tuple(row["shape"]), {})[row["bits"]] = row["us"]
    columns = [
        Column("sequences x tokens", lambda line: f"{line[0][0]} x {line[0][1]:,}"),
        Column("heads: query, key/value, channels", lambda line: ", ".join(map(str, line[0][2:]))),
        *(Column(f"{bits} bits", _time, (bits,)) for bits in (16, 8, 4)),
        *(Column(f"16 / {bits}", _ratio, (bits,)) for bits in (8, 4)),
    ]
    return table(columns, times.items())


def _time(line: tuple[Any, Times], bits: int) -> str:
    return figure(line[1].get(bits))


def _ratio(line: tuple[Any, Times], bits: int) -> str:
    found = line[1]
    return figure(found[16] / found[bits] if {16, bits} <= found.keys() else None, digits=2)
