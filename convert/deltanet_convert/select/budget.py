"""How much a selection may keep: a number of units, a share of them, or bytes per sequence at a length."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltanet_hf.errors import UserError

from ..conversion_plan import LayerPlan
from ..options import parse_size
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
        kind: "count", "share", "bytes", or "memory share" (of the teacher's cache).
        at: tokens of the sequence whose bytes count; None for "count" and "share".
        said: the budget in the user's words.
        option: the option it came from, for messages.
    """

    amount: float
    kind: str
    at: int | None
    said: str
    option: str

    @classmethod
    def keep(cls, text: str, option: str = "--keep") -> Budget:
        """Parses '7' or '25%'."""
        if (share := _percent(text)) is not None:
            return cls(share, "share", None, text, f"{option} {text}")
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise UserError(f"{option}: got '{text}', expected a number of units such as 7 or a share such as 25%")
        return cls(int(text), "count", None, text, f"{option} {text}")

    @classmethod
    def memory(cls, text: str, at: int, option: str = "--memory") -> Budget:
        """Parses '40MB' or '5%' (of the teacher's cache), both at a length of `at` tokens."""
        if at < 1:
            raise UserError(f"--at: got {at}, expected the length of a sequence in tokens, such as 32768")
        share, said = _percent(text), f"{text} at {at} tokens"
        amount: float = parse_size(text, option) if share is None else share
        return cls(amount, "bytes" if share is None else "memory share", at, said, f"{option} {said}")

    @classmethod
    def auto(cls, spec: str) -> Budget:
        """Parses the value of `convert --layers auto:...`: '7', '25%', '40MB@32768' or '5%@8192'."""
        text, separator, length = spec.partition("@")
        if not separator:
            return cls.keep(text, "--layers auto:")
        if not re.fullmatch(r"\d{1,9}", length, re.ASCII):
            raise UserError(f"--layers auto:{spec}: '{length}' is no length in tokens; write it as auto:40MB@32768")
        return cls.memory(text, int(length), "--layers auto:")

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
            raise UserError(f"{self.option}: keeps none of the {available} units; give a larger budget")
        if found > available:
            raise UserError(f"{self.option}: there are only {available} units; give a smaller budget")
        if found == available:
            raise UserError(f"{self.option}: keeps all {available} units; leave at least one to convert")
        return found

    def _units_of_bytes(self, available: int, memory: Memory) -> int:
        allowed = self.amount * memory.teacher if self.kind == "memory share" else self.amount
        if memory.kept <= memory.other:
            raise UserError(
                f"{self.option}: at {memory.at} tokens the keys and values of a unit ({size(round(memory.kept))}) are "
                f"no larger than the cache in its place ({size(round(memory.other))}); give a larger length, or a "
                "--mixer with a state or a window"
            )
        smallest = memory.total(1, available)
        if allowed < smallest:
            raise UserError(
                f"{self.option}: {size(int(allowed))} are too few: the states alone are "
                f"{size(memory.total(0, available))}, with one unit kept {size(smallest)}; give a larger budget"
            )
        return min(available, int((allowed - memory.total(0, available)) / (memory.kept - memory.other) + 1e-9))


def _percent(text: str) -> float | None:
    """The share that '25%' names; None if the text is no percentage."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", text, re.ASCII)
    return float(match[1]) / 100 if match else None
