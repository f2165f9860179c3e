"""Figures of the teacher and its control, kept as files that many runs share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from deltanet_hf.evaluation.measures.measure import Measured
from measuring.study.hybrid_measure import HybridMeasure


class SharedFigures:
    """The figures in a folder; those that are not there yet are measured.

    Several processes may use the folder: each file is written as a whole, and what two compute at once is equal. The
    names of the files depend on the teacher's weights and on everything that is measured.
    """

    def __init__(self, folder: Path, measure: HybridMeasure) -> None:
        self.folder, self.measure, self.key = folder, measure, measure.fingerprint()
        folder.mkdir(parents=True, exist_ok=True)
        self.teacher = self._kept("teacher", lambda: measure(measure.teacher))
        self.control = self._kept("control", measure.control)

    def _kept(self, name: str, compute: Callable[[], Measured]) -> Measured:
        """The contents of the file of this name; written first if there is none."""
        path = self.folder / f"{name}-{self.key}.json"
        if not path.is_file():
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(compute().to_dict()))
            partial.replace(path)
        return Measured.from_dict(json.loads(path.read_text()))
