"""The outcomes of single texts and probes of each row, in a file named after that of the rows (`OUT-items.json.xz`).

With them every comparison of two rows can be made again, by paired differences.
"""

from __future__ import annotations

from pathlib import Path

from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.relative import Clusters
from measuring.rows import RowFile


def _items(results: Path) -> RowFile:
    """The outcomes of the rows' windows and probes."""
    head = {"clusters": "name: sums, numbers of items"}
    return RowFile(results.with_name(f"{results.stem}-items.json.xz"), head=head)


def save_items(results: Path, run: str, measured: Measured) -> None:
    """Keep the outcomes of a row's windows and probes, to five digits."""
    rounded = {name: Clusters(part.sums.round(5), part.sizes) for name, part in measured.clusters.items()}
    _items(results).add({"run": run, **Measured(measured.bytes, rounded).to_dict()})


def load_items(results: Path) -> dict[str, Measured]:
    """Run -> what `save_items` kept of it."""
    return {row["run"]: Measured.from_dict(row) for row in _items(results).rows()}
