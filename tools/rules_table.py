"""The table of all rules for readme_tables.py: what each computes, and what was measured of it.

The words are in YAML, {alone: FILE, window: FILE, rows: [{rule, equation, ...}, ...]}; figures are those of the runs of
both result files, whose names begin with the rule's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deltanet_hf.mixers import MIXERS
from measuring.markdown import Column, figure, table
from measuring.rows import Row, RowFile

WORDS = {
    "equation": "state and output",
    "adds": "what it adds",
    "state": "numbers",
    "kernels": "forms",
}
ALONE = ("kl", 3, "{}-all-s0", "{}-all-3m-s0")  # key, digits, names of a run and of a short one
WINDOW = ("kl_4k", 4, "seven-97-{}@4", "seven-97-{}-3m@4")


def rules(path: Path) -> str:
    """One line per rule; a dash where no run was made."""
    layout = yaml.safe_load(path.read_text())
    alone, window = (
        {row["run"]: row for row in RowFile(path.parent / layout[name]).rows()} for name in ("alone", "window")
    )
    columns = [
        Column("rule, paper", _name),
        *(Column(header, lambda row, key: row[key], (key,)) for key, header in WORDS.items()),
        Column("KL alone", _measured, (alone, *ALONE)),
        Column("KL, window", _measured, (window, *WINDOW)),
    ]
    return table(columns, layout["rows"])


def _name(row: dict[str, str]) -> str:
    """The rule with a link to its file, and its paper."""
    file = MIXERS[row["rule"]].__module__.replace(".", "/")
    return f"[`{row['rule']}`](../{file}.py)<br>[{row['paper']}](https://arxiv.org/abs/{row['arxiv']})"


def _measured(row: dict[str, Any], found: dict[str, Row], key: str, digits: int, run: str, short: str) -> str:
    """The figure of a run, or in italics that of a short one."""
    long, brief = (found.get(name.format(row["rule"])) for name in (run, short))
    if long is None and brief is not None:
        return f"*{figure(brief[key], digits=digits)}*"
    return figure(long and long[key], digits=digits)
