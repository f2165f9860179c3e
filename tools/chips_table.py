"""The tables of `deltanet_kernels.gated_delta_rule.chips` in Markdown, for docs/kernel-code.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltanet_kernels.gated_delta_rule.chips import EVERY_SIZE, KERNELS, SIZES, UP_TO_256
from measuring.markdown import Column, table

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def kernels() -> str:
    """Which kernel serves which calls; the first row of a stage that fits counts."""
    columns = [
        Column("stage", lambda row: row.stage),
        Column("file", lambda row: ", ".join(_file(name) for name in row.file.split(", "))),
        Column("chip", lambda row: _chip(row.chip)),
        Column("dtype", lambda row: _dtypes(row.dtypes)),
        Column("K", lambda row: _sizes(row.K, EVERY_SIZE)),
        Column("V", lambda row: _sizes(row.V, EVERY_SIZE)),
        Column("heads", lambda row: row.heads),
        Column("Gluon", lambda row: "yes" if row.gluon else ""),
    ]
    return table(columns, KERNELS)


def sizes() -> str:
    """Tokens per chunk, and slices of V / warps (/ stages) of the kernels; the first row that fits counts."""
    columns = [
        Column("chip", lambda row: _chip(row[0])),
        Column("dtype", lambda row: _dtypes(row[1])),
        Column("tile of K", lambda row: _sizes(row[2], UP_TO_256)),
        Column("tile of V", lambda row: _sizes(row[3], UP_TO_256)),
        Column("tokens", lambda row: str(row[4].C)),
        Column("states", lambda row: f"{row[4].state_BV} / {row[4].state_warps} / {row[4].state_stages}"),
        Column("outputs", lambda row: f"{row[4].output_BV} / {row[4].output_warps}"),
        Column("states, backward", lambda row: f"{row[4].grad_BV} / {row[4].grad_warps} / {row[4].grad_stages}"),
        Column("pairs", lambda row: f"{row[4].pair_BV} / {row[4].pair_warps}"),
        Column("inputs", lambda row: f"{row[4].input_BV} / {row[4].input_warps}"),
    ]
    return table(columns, SIZES)


def _file(text: str) -> str:
    name, _, rest = text.partition(" ")
    return f"`{name}` {rest}".strip()


def _chip(chip: int | None) -> str:
    return "any" if chip is None else f"sm_{chip}0"


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    return "any" if len(dtypes) == len(DTYPES) else ", ".join(DTYPES[dtype] for dtype in dtypes)


def _sizes(sizes: Sequence[int], every: Sequence[int]) -> str:
    if tuple(sizes) == tuple(every):
        return "any"
    return f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 2 else " or ".join(map(str, sizes))
