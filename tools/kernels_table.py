"""The tables of the result files of `python -m measuring.kernels`, for readme_tables.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from measuring.markdown import Column, table
from measuring.rows import Row

NAMES = {
    "deltanet": "deltanet-hf",
    "fla": "flash-linear-attention",
    "fla_bounded": "flash-linear-attention (`safe_gate`)",
    "flash_qla": "FlashQLA",
    "flashinfer": "FlashInfer, norm outside",
    "flex_attention": "FlexAttention",
    "sdpa": "SDPA",
}  # of what stands before a comma in `impl`
LABELS = {
    "rule": "rule",
    "form": "form",
    "operator": "operator",
    "call": "call",
    "impl": "implementation",
    "shape": "B, T, heads, head size",  # where the file has no header
    "gates": "log decays",
    "K": "head size",
    "pass": "pass",
}
TIMES = {
    ("fwd_graph_ms", "fwdbwd_graph_ms"): "Milliseconds in a CUDA graph, forward / forward + backward",
    ("fwd_ms", "fwdbwd_ms"): "Milliseconds, launched eagerly, forward / forward + backward",
    ("us",): "Microseconds in a CUDA graph",
}  # of implementations side by side; a table has the first that its file has
EAGER = " (* launched eagerly, because no graph holds it)"
FIGURES = {
    "forward_us": "forward, us",
    "recorded_us": "forward, gradients recorded, us",
    "fwdbwd_us": "forward + backward, us",
    "fwd_ms": "forward, ms",
    "fwdbwd_ms": "forward + backward, ms",
    "peak_gib": "GiB",
    "rel_error": "error",
    "deltanet_kernels.median_ms": "deltanet-hf, ms",
    "transformers.median_ms": "transformers, ms",
    "speedup": "times faster",
    "deltanet_kernels.peak_mib": "deltanet-hf, MiB",
    "transformers.peak_mib": "transformers, MiB",
}  # of the files with one line per row
MOST_RATIOS = 2  # columns, which would make a table of more too wide

Line = tuple[tuple[str, ...], dict[str, Row]]  # labels, implementation -> row


def kernels(path: Path) -> str:
    """Times of implementations side by side, of few with ratios to the first; without `impl` a line per row."""
    file = json.loads(path.read_text())
    rows = [_flat(row) for row in file["rows"]]
    two_streams = "impl" in rows[0]
    headers = LABELS | {"shape": file.get("shape", LABELS["shape"]).partition(";")[0]}
    labels = [key for key in _present(headers, rows) if not (two_streams and key == "impl")]
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(_label(row, key) for key in labels), {})[row["impl"] if two_streams else ""] = row
    columns = [Column(headers[key], lambda line, place: line[0][place], (place,)) for place, key in enumerate(labels)]
    if not two_streams:
        columns += [Column(FIGURES[key], _times, ("", [key])) for key in _present(FIGURES, rows)]
        return table(columns, lines.items())
    keys = next(keys for keys in TIMES if _present(keys[:1], rows))
    timed = {row["impl"] for row in rows if "fwd_ms" in row or "us" in row}
    names = {row["impl"]: _name(row["impl"]) for row in rows if row["impl"] in timed}
    columns += [Column(name, _times, (impl, keys)) for impl, name in names.items()]
    first, *others = names
    if len(others) <= MOST_RATIOS:
        columns += [Column(f"{names[impl]} / {names[first]}", _ratios, (impl, first, keys)) for impl in others]
    made = table(columns, lines.items())
    return f"{TIMES[keys]}{EAGER if '*' in made else ''}:\n\n{made}"


def _flat(row: Row) -> Row:
    """The row with the figures of its parts as `part.figure`, and with its bits as `impl`."""
    parts = {f"{name}.{key}": part[key] for name, part in row.items() if isinstance(part, dict) for key in part}
    bits = {"impl": f"{row['bits']} bits" + (", key order" if row["key_order"] else "")} if "bits" in row else {}
    return row | parts | bits


def _present(keys: Iterable[str], rows: Sequence[Row]) -> list[str]:
    return [key for key in keys if any(key in row for row in rows)]


def _label(row: Row, key: str) -> str:
    if key == "gates":
        gates = row.get(key, (-1.0, 0.0))
        return "FlashQLA's" if isinstance(gates, str) else "({:g}, {:g})".format(*gates)
    value = row.get(key, "-")
    return ", ".join(map(str, value)) if isinstance(value, list) else _name(str(value))


def _name(impl: str) -> str:
    name, comma, rest = impl.partition(", ")
    return NAMES.get(name, name) + comma + rest


def _times(line: Line, impl: str, keys: Sequence[str]) -> str:
    return _joined(_time(line[1].get(impl, {}), key) for key in keys)


def _time(row: Row, key: str) -> str:
    """A dash for none; a star after one that was launched eagerly, where the others are those of a graph."""
    if key in row:
        return _figure(row[key])
    eager = row.get(key.replace("_graph", ""))
    return "-" if eager is None else f"{_figure(eager)}*"


def _ratios(line: Line, impl: str, first: str, keys: Sequence[str]) -> str:
    row, base = (line[1].get(name, {}) for name in (impl, first))
    return _joined(f"{row[key] / base[key]:.2f}" if key in row and key in base else "-" for key in keys)


def _joined(texts: Iterable[str]) -> str:
    found = list(texts)
    return "-" if set(found) == {"-"} else " / ".join(found)


def _figure(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"
