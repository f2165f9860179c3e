"""The options of a selection and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deltanet_hf.errors import UserError
from deltanet_hf.loading import chosen_device

from .budget import Budget
from .methods import EXPORTABLE, METHODS
from .units import UNITS


@dataclass(frozen=True)
class SelectOptions:
    """The options of one selection.

    Raises:
        UserError: a value cannot be used, or two options contradict each other; the message names the option.
    """

    budget: Budget
    unit: str = "layer"  # one of `UNITS`
    method: str = "forward"  # one of `METHODS`, or `EXPORTABLE`
    window: int = 64  # tokens that a unit sees which is not kept
    sinks: int = 4
    length: int = 1024  # tokens per probe
    probes: int = 8  # per format; rows of running text for `kl`: four times as many
    seed: int = 0
    device: str | None = None  # None for a GPU if there is one
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"--unit: got '{self.unit}', expected one of {', '.join(UNITS)}")
        if self.method not in (*METHODS, EXPORTABLE):
            raise UserError(f"--method: got '{self.method}', expected one of {', '.join(METHODS)}")
        if self.method == EXPORTABLE and self.unit != "layer":
            raise UserError("--exportable: other runtimes keep whole layers; leave out --unit or --exportable")
        for name, least in (("window", 1), ("sinks", 0), ("length", 32), ("probes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name}: got {getattr(self, name)}, expected at least {least}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed: got {self.seed}, expected a number from 0 to 2**32 - 1")

    @property
    def measured(self) -> bool:
        """Whether the method runs the teacher."""
        return self.method not in ("uniform", EXPORTABLE)

    def settings(self, length: int) -> dict[str, Any]:
        """The options that the scores depend on, for the file; `length` is that of the probes, cut to the context."""
        if not self.measured:
            return {}
        return {"window": self.window, "sinks": self.sinks, "length": length, "probes": self.probes}

    @property
    def torch_device(self) -> torch.device:
        """The device that the teacher runs on; UserError if there is no such device."""
        return chosen_device(self.device)
