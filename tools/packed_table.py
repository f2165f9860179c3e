"""The table of attention to packed keys and values, from the rows of `python -m measuring.kernels packed_attention`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measuring.markdown import Column, figure, table

Form = tuple[int, bool]  # bits, and whether keys have an order
Times = dict[Form, float]  # microseconds
WHOLE: Form = (16, False)
FORMS: dict[Form, str] = {(4, False): "4 bits", (4, True): "4 bits, key order"}


def packed(path: Path) -> str:
    """One line per shape: microseconds in 16 and 4 bits, and how many times faster the latter are than 16."""
    times: dict[tuple[int, ...], Times] = {}
    for row in json.loads(path.read_text())["rows"]:
        if "us" in row:
            times.setdefault(tuple(row["shape"]), {})[row["bits"], row["key_order"]] = row["us"]
    columns = [
        Column("sequences x tokens", lambda line: f"{line[0][0]} x {line[0][1]:,}"),
        Column("heads: query, key/value, channels", lambda line: ", ".join(map(str, line[0][2:]))),
        Column("16 bits", _time, (WHOLE,)),
        *(Column(name, _time, (form,)) for form, name in FORMS.items()),
        *(Column(f"16 / {name}", _ratio, (form,)) for form, name in FORMS.items()),
    ]
    return table(columns, times.items())


def _time(line: tuple[Any, Times], form: Form) -> str:
    return figure(line[1][form])


def _ratio(line: tuple[Any, Times], form: Form) -> str:
    return figure(line[1][WHOLE] / line[1][form], digits=2)
