"""The journal of an unfinished selection: what was asked for, the reference losses, and every finished round."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from deltanet_hf.errors import UserError
from deltanet_hf.journal import Journal
from deltanet_hf.safe_write import writing

from .allocation import Allocation
from .methods import Round
from .references import References
from .units import Unit, to_json

REFERENCES = "references"
ALLOCATION = "allocation "  # begins the names of such steps


class SelectionJournal(Journal):
    """The file `.NAME.journal` beside the output NAME; a run with the same request continues after the last round.

    Args:
        out: the output file.
        request: everything that the result depends on, as a JSON value.
        overwrite: replace existing outputs, and discard the journal of a run with another request.
        units: the units to choose from.
        plot: the file that is written beside the output; None for none.

    Raises:
        UserError: an output exists, or an unfinished run to it had other options, and `overwrite` was not given; or an
            output cannot be written.
    """

    def __init__(
        self,
        out: Path,
        request: dict[str, Any],
        overwrite: bool,
        units: Collection[Unit],
        plot: Path | None = None,
    ) -> None:
        remedy = "start again with --overwrite, or repeat the first command to complete it"
        super().__init__(self.path_of(out), f"an unfinished selection to {out}", remedy)
        self.units = units
        files = [out] if plot is None else [out, plot]
        with writing(out):
            for file in files:
                if file.is_dir():
                    raise UserError(f"{file}: is a folder; give the name of a file")
        try:
            found = self.resume(request, self._check)
        except UserError:
            if not overwrite:
                raise
            found = False
        if not found:
            for file in files:
                if file.exists() and not overwrite:
                    raise UserError(f"{file}: exists; choose another file, or add --overwrite to replace it")
            self.begin(request)

    @staticmethod
    def path_of(out: Path) -> Path:
        """The journal's place."""
        return out.parent / f".{out.name}.journal"

    def _check(self) -> None:
        """Raises one of the errors that `resume` expects unless the steps are those that a run writes."""
        self.references()
        self.allocations()
        numbered = [step for step in self.steps if step != REFERENCES and not step.startswith(ALLOCATION)]
        if numbered != [f"round {number + 1}" for number in range(len(numbered))]:
            raise ValueError("a round is missing")
        rounds = self.rounds()
        if not all(math.isfinite(found.score) for found in rounds):
            raise ValueError("a score is not a number")
        chosen = [found.unit for found in rounds]
        if len(set(chosen)) != len(chosen) or not set(chosen) <= set(self.units):
            raise ValueError("a round chose a unit that the model does not have, or one twice")

    def references(self) -> References | None:
        """The figures of the step `REFERENCES` if it is done."""
        found = self.steps.get(REFERENCES)
        return None if found is None else References.from_json(found)

    def rounds(self) -> list[Round]:
        """The finished rounds."""
        found = (figures for step, figures in self.steps.items() if step.startswith("round "))
        return [
            Round(_unit(step["unit"]), float(step["score"]), {_unit(unit): gain for unit, gain in step["gains"]})
            for step in found
        ]

    def allocations(self) -> list[Allocation]:
        """The measured allocations."""
        found = [Allocation.from_json(figures) for step, figures in self.steps.items() if step.startswith(ALLOCATION)]
        if not all(math.isfinite(allocation.cost(found[0])) for allocation in found):
            raise ValueError("a loss is not a number")
        return found

    def allocated(self, found: Allocation) -> None:
        """Records an allocation."""
        self.done(f"{ALLOCATION}{len(self.allocations())}", found.to_json())

    def round_done(self, number: int, found: Round) -> None:
        """Records a round."""
        gains = [[to_json(unit), gain] for unit, gain in found.gains.items()]
        self.done(f"round {number}", {"unit": to_json(found.unit), "score": found.score, "gains": gains})


def _unit(value: int | list[int]) -> Unit:
    return (value,) if isinstance(value, int) else tuple(value)
