"""The tables of `python -m measuring.kernels chunk` and `channel_gates`, for readme_tables.py."""

from __future__ import annotations

import json
from pathlib import Path

from measuring.markdown import Column, table
from measuring.rows import Row

NAMES = {
    "deltanet": "deltanet-hf",
    "fla": "flash-linear-attention",
    "fla_bounded": "flash-linear-attention, `safe_gate`",
    "flash_qla": "FlashQLA",
    "flashinfer": "FlashInfer",
    "sdpa": "causal softmax (SDPA)",
}

Labels = tuple[str, str, str]  # rule, shape, log decays
Line = tuple[Labels, dict[str, Row]]  # implementation -> row


def kernels(path: Path) -> str:
    """One line per rule, shape and gates: milliseconds by CUDA graph of each implementation, forward / both passes."""
    rows = json.loads(path.read_text())["rows"]
    lines: dict[Labels, dict[str, Row]] = {}
    for row in rows:
        labels = row.get("rule", ""), ", ".join(map(str, row["shape"])), _gates(row.get("gates", [-1.0, 0.0]))
        lines.setdefault(labels, {})[row["impl"]] = row
    heads = ("rule", "B, T, heads, head size") if "rule" in rows[0] else ("", "B, T, key heads, value heads, head size")
    columns = [
        Column(header, lambda line, place: line[0][place], (place,))
        for place, header in enumerate([*heads, "log decays"])
        if header
    ]
    for impl, name in NAMES.items():
        own = [row for row in rows if row["impl"] == impl and "fwd_ms" in row]
        outside = ", norm outside" if any(row.get("norm") == "outside" for row in own) else ""
        columns += [Column(name + outside, _times, (impl,))] if own else []
    return table(columns, lines.items())


def _gates(gates: str | list[float]) -> str:
    return "FlashQLA's" if isinstance(gates, str) else f"({gates[0]:g}, {gates[1]:g})"


def _times(line: Line, impl: str) -> str:
    row = line[1].get(impl, {})
    return " / ".join(_time(row, name) for name in ("fwd", "fwdbwd")) if "fwd_ms" in row else "-"


def _time(row: Row, name: str) -> str:
    """A dash for a pass without a time; a star after one that was launched eagerly, because no graph could hold it."""
    graph, eager = row.get(f"{name}_graph_ms"), row.get(f"{name}_ms")
    return _figure(graph) if graph else f"{_figure(eager)}*" if eager else "-"


def _figure(ms: float) -> str:
    return f"{ms:#.3g}".rstrip(".")
