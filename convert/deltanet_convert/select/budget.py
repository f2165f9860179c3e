"""How much a selection may keep: a number of units, a share of them, or bytes per sequence at a length."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltanet_hf.errors import UserError

from ..command_options import parse_size
from ..conversion_plan import LayerPlan
from ..views.plan_view import size
from .units import Candidates


@dataclass(frozen=True)
class Memory:
    """Bytes of the caches of one sequence of `at` tokens.

    Attributes:
        at: tokens of the sequence.
        teacher: all layers of the teacher.
        kept: one kept unit.
        other: one unit that is not kept: its part of the converted layer's cache.
        fixed: layers that are no candidates and stay as they are.
    """

    at: int
    teacher: int
    kept: float
    other: float
    fixed: int

    @classmethod
    def of(cls, layers: tuple[LayerPlan, ...], candidates: Candidates, at: int) -> Memory:
        """Counts the bytes.

        Args:
            layers: the plan of a conversion of every layer, which knows the size of the states.
        """
        own = [layer for layer in layers if layer.index in {unit[0] for unit in candidates.units}]
        units = len(candidates.units)
        return cls(
            at=at,
            teacher=sum(layer.kv_bytes(at) for layer in layers),
            kept=sum(layer.kv_bytes(at) for layer in own) / units,
            other=sum(layer.cache_bytes(at) for layer in own) / units,
            fixed=sum(layer.kv_bytes(at) for layer in layers if layer not in own),
        )

    def total(self, kept: int, units: int) -> int:
        """Bytes of the converted model's cache with `kept` of `units` units kept."""
        return round(self.fixed + kept * self.kept + (units - kept) * self.other)


@dataclass(frozen=True)
class Budget:
    """A budget as the user gave it.

    Attributes:
        amount: a number of units, a share of 1, or bytes.
        kind: "count", "share" (of the units; of the teacher's cache if there is a length), or "bytes".
        at: tokens of the sequence whose bytes count; None for a number or share of units.
        text: the budget in the user's words.
        said: the option with its value, for messages.
    """

    amount: float
    kind: str
    at: int | None
    text: str
    said: str

    @classmethod
    def parse(cls, text: str, option: str = "--keep ") -> Budget:
        """Parses '7' or '25%' of the units, '40MB@32768' (bytes of a sequence) or '5%@32768' (of the teacher's bytes).

        Args:
            option: what stands before the text on the command line.
        """
        said = f"{option}{text}"
        amount, separator, length = text.partition("@")
        if separator and not (re.fullmatch(r"\d{1,9}", length, re.ASCII) and int(length)):
            raise UserError(f"{said}: '{length}' is no length in tokens; write it as 40MB@32768")
        at = int(length) if separator else None
        if share := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", amount, re.ASCII):
            return cls(float(share[1]) / 100, "share", at, text, said)
        if at is not None:
            return cls(parse_size(amount, said), "bytes", at, text, said)
        if not re.fullmatch(r"\d{1,9}", amount, re.ASCII):
            raise UserError(f"{said}: expected a number of units such as 7, a share such as 25%, or 40MB@32768")
        return cls(int(amount), "count", None, text, said)

    def units(self, candidates: Candidates, memory: Memory | None) -> int:
        """The number of units to keep.

        Args:
            memory: the bytes at length `at`; only needed for budgets in bytes.

        Raises:
            UserError: the budget keeps nothing, everything, or less than the states alone hold.
        """
        available = len(candidates.units)
        if memory is None:
            found = int(self.amount if self.kind == "count" else self.amount * available + 1e-9)
        else:
            found = self._units_of_bytes(available, memory)
        if found < 1:
            raise UserError(f"{self.said}: keeps none of the {available} units; give a larger budget")
        if found > available:
            raise UserError(f"{self.said}: there are only {available} units; give a smaller budget")
        if found == available:
            raise UserError(f"{self.said}: keeps all {available} units; leave at least one to convert")
        return found

    def _units_of_bytes(self, available: int, memory: Memory) -> int:
        allowed = self.amount * memory.teacher if self.kind == "share" else self.amount
        if memory.kept <= memory.other:
            raise UserError(
                f"{self.said}: at {memory.at} tokens the keys and values of a unit ({size(round(memory.kept))}) are "
                f"no larger than the cache in its place ({size(round(memory.other))}); give a larger length, or a "
                "--mixer with a state or a window"
            )
        smallest = memory.total(1, available)
        if allowed < smallest:
            raise UserError(
                f"{self.said}: {size(int(allowed))} are too few: the states alone are "
                f"{size(memory.total(0, available))}, with one unit kept {size(smallest)}; give a larger budget"
            )
        return min(available, int((allowed - memory.total(0, available)) / (memory.kept - memory.other) + 1e-9))
