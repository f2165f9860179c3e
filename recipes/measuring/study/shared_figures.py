"""Figures of the teacher, its control and the training-free baselines, kept as files that many runs share."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.training_free import WindowPolicy, window_of_bytes
from measuring.study.hybrid_measure import BYTES_AT, HybridMeasure


class SharedFigures:
    """The figures in a folder; those that are not there yet are measured.

    Several processes may use the folder: each file is written as a whole, and what two compute at once is equal. The
    names of the files depend on the teacher's weights and on everything that is measured.
    """

    def __init__(self, folder: Path, measure: HybridMeasure) -> None:
        self.folder, self.measure, self.key = folder, measure, measure.fingerprint()
        folder.mkdir(parents=True, exist_ok=True)
        self.teacher = self._measured("teacher", lambda: measure(measure.teacher))
        self.control = self._measured("control", measure.control)

    def policy(
        self, kept: tuple[int, ...], heads: tuple[tuple[int, int], ...], budget: int
    ) -> tuple[WindowPolicy, Measured] | None:
        """The training-free baseline that keeps these layers and heads, of at least `budget` bytes, with its figures.

        None if no policy is as small.
        """
        names = repr(kept) + (repr(heads) if heads else "")
        layers = hashlib.sha256(names.encode()).hexdigest()[:8] if kept or heads else "none"
        teacher = self.measure.teacher

        def solve() -> list[int | None] | None:
            found = window_of_bytes(teacher, kept, budget, BYTES_AT, heads=heads)
            return None if found is None else [found.window]

        solved = self._kept(f"bytes-{budget}-kept-{layers}", solve)
        if solved is None:
            return None
        policy = WindowPolicy(kept, solved[0], heads=heads)
        return policy, self._measured(
            f"window-{policy.window}-kept-{layers}", lambda: self.measure(policy.apply(teacher))
        )

    def _measured(self, name: str, compute: Callable[[], Measured]) -> Measured:
        return Measured.from_dict(self._kept(name, lambda: compute().to_dict()))

    def _kept(self, name: str, compute: Callable[[], Any]) -> Any:
        """The contents of the file of this name; written first if there is none."""
        path = self.folder / f"{name}-{self.key}.json"
        if not path.is_file():
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(compute()))
            partial.replace(path)
        return json.loads(path.read_text())
