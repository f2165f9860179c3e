"""The tables of `deltanet_kernels.gated_delta_rule.chips` in Markdown, for docs/kernels.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deltanet_kernels.gated_delta_rule.chips import EVERY_SIZE, KERNELS, SIZES, UP_TO_256

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def kernels() -> str:
    """Which kernel serves which calls; the first row of a stage that fits counts."""
    rows = [
        (
            row.stage, ", ".join(_file(name) for name in row.file.split(", ")), _chip(row.chip), _dtypes(row.dtypes),
            _sizes(row.K, EVERY_SIZE), _sizes(row.V, EVERY_SIZE), row.heads, "yes" if row.gluon else "",
        )
        for row in KERNELS
    ]  # fmt: skip
    return _table(("stage", "file", "chip", "dtype", "K", "V", "heads", "Gluon"), rows)


def sizes() -> str:
    """Tokens per chunk, and slices of V / warps (/ stages) of the kernels; the first row that fits counts."""
    rows = []
    for chip, dtypes, BK, BV, c in SIZES:
        cells = (
            f"{c.state_BV} / {c.state_warps} / {c.state_stages}", f"{c.output_BV} / {c.output_warps}",
            f"{c.grad_BV} / {c.grad_warps} / {c.grad_stages}", f"{c.pair_BV} / {c.pair_warps}",
            f"{c.input_BV} / {c.input_warps}",
        )  # fmt: skip
        tiles = (_sizes(BK, UP_TO_256), _sizes(BV, UP_TO_256))
        rows.append((_chip(chip), _dtypes(dtypes), *tiles, str(c.C), *cells))
    head = ("chip", "dtype", "tile of K", "tile of V", "tokens", "states", "outputs", "states, backward", "pairs")
    return _table((*head, "inputs"), rows)


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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
