"""The losses that a score is rescaled with, and the probe formats that are of no use for a teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from deltanet_hf.errors import UserError

from .objectives import AnswerLoss, TextKL
from .scoring import ScaledLoss, Scorer

LEAST_GAIN = 0.1  # nats per answer token that full attention has to gain over windows
LEAST_SHARE = 0.15  # share of the windows' loss that full attention has to take off: otherwise the format is too hard


@dataclass(frozen=True)
class References:
    """Losses by part of the teacher (`teacher`) and with windows everywhere (`windows`), and dropped formats.

    `dropped` says of each unused format why.
    """

    teacher: dict[str, float]
    windows: dict[str, float]
    dropped: dict[str, str]

    @classmethod
    def measure(cls, scorer: Scorer, objective: AnswerLoss | TextKL) -> References:
        """Runs the teacher and the model with windows everywhere."""
        full = dict(zip(objective.names, scorer.losses(objective, None).tolist(), strict=True))
        near = dict(zip(objective.names, scorer.losses(objective, ()).tolist(), strict=True))
        found = {name: _problem(full[name], near[name]) for name in objective.names}
        dropped = {name: problem for name, problem in found.items() if problem and isinstance(objective, AnswerLoss)}
        return cls(full, near, dropped)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> References:
        """Raises KeyError, TypeError or ValueError if `value` is not what `to_json` gives."""
        teacher, windows = ({str(k): float(v) for k, v in value[key].items()} for key in ("teacher", "windows"))
        if not teacher or teacher.keys() != windows.keys():
            raise ValueError("the reference losses are incomplete")
        return cls(teacher, windows, dict(value["dropped"]))

    def to_json(self) -> dict[str, Any]:
        return {"teacher": self.teacher, "windows": self.windows, "dropped": self.dropped}

    def score(self, scorer: Scorer, objective: AnswerLoss | TextKL, name: str) -> ScaledLoss:
        """The score by these losses, on the objective without the dropped formats.

        Raises:
            UserError: there is nothing to measure with this teacher; the message begins with its `name`.
        """
        if not all(math.isfinite(loss) for loss in self.teacher.values()):
            raise UserError(
                f"{name}: its loss on the probes is not a number, so its weights hold infinite values or NaN; give the "
                "teacher as it was published"
            )
        kept = [part for part in objective.names if part not in self.dropped]
        if not kept:
            raise UserError(
                f"{name}: full attention answers no probe format better than windows do, so recall says nothing about "
                "its layers; choose --method kl"
            )
        if not min(self.windows[part] - self.teacher[part] for part in kept) > 0:
            raise UserError(
                f"{name}: windows change nothing on texts of this length; choose a larger --length or smaller --window"
            )
        if isinstance(objective, AnswerLoss) and self.dropped:
            objective = objective.only(kept)
        teacher, windows = (torch.tensor([losses[name] for name in kept]) for losses in (self.teacher, self.windows))
        return ScaledLoss(scorer, objective, teacher, windows)


def _problem(teacher: float, windows: float) -> str | None:
    """Why a format is of no use; None if it is."""
    figures = f"{teacher:.2f} nats per token, with windows {windows:.2f}"
    if not windows - teacher >= LEAST_GAIN:
        return f"full attention gains nothing ({figures})"
    if windows - teacher < LEAST_SHARE * windows:
        return f"too hard for the teacher ({figures})"
    return None
