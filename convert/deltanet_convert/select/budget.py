"""How much a selection may keep: a number of units, a share of them, or bytes per sequence at a length."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deltanet_hf.errors import UserError

from ..command_options import parse_size
from ..conversion_plan import LayerPlan
from ..views.plan_view import size
from .cache_sizes import CacheSizes
from .units import Candidates


@dataclass(frozen=True)
class Memory:
    """Bytes of the caches of one sequence of `at` tokens.

    Attributes:
        at: tokens of the sequence.
        teacher: all layers of the teacher, in 16 bits.
        bits: of the converted model's keys and values.
        kept: one kept unit.
        other: one unit that is not kept: its part of the converted layer's cache.
        fixed: layers that are no candidates and stay as they are.
    """

    at: int
    teacher: int
    bits: int
    kept: float
    other: float
    fixed: int

    @classmethod
    def of(cls, layers: tuple[LayerPlan, ...], sizes: CacheSizes) -> Memory:
        """Counts the bytes.

        Args:
            layers: the plan of a conversion of every layer, which knows the size of the states.
            sizes: of whole layers.
        """
        units = sizes.candidates.units
        own = [layer for layer in layers if layer.index in {unit[0] for unit in units}]
        fixed = sizes.whole(layer.index for layer in layers if layer not in own)
        return cls(
            at=sizes.at,
            teacher=sizes.teacher_bytes,
            bits=sizes.bits,
            kept=sizes.whole(layer.index for layer in own) / len(units),
            other=sum(layer.cache_bytes(sizes.at) for layer in own) / len(units),
            fixed=fixed,
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
        """Parses '7' or '25%' of the units, '40MB@32k' (bytes of a sequence) or '5%@32k' (of the teacher's bytes).

        A length may be given in tokens or, as '32k', in 1,024 of them.

        Args:
            option: what stands before the text on the command line.
        """
        said = f"{option}{text}"
        amount, separator, length = text.partition("@")
        number = re.fullmatch(r"(\d{1,9})(k?)", length, re.ASCII)
        if separator and not (number and int(number[1])):
            raise UserError(f"{said}: '{length}' is no length in tokens; write it as 40MB@32768 or 40MB@32k")
        at = int(number[1]) * (1024 if number[2] else 1) if number else None
        if share := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", amount, re.ASCII):
            return cls(float(share[1]) / 100, "share", at, text, said)
        if at is not None:
            return cls(parse_size(amount, said), "bytes", at, text, said)
        if not re.fullmatch(r"\d{1,9}", amount, re.ASCII):
            raise UserError(f"{said}: expected a number of units such as 7, a share such as 25%, or 40MB@32k")
        return cls(int(amount), "count", None, text, said)

    def allowed(self, teacher: int) -> int:
        """The bytes that a budget in bytes allows.

        Args:
            teacher: bytes of the teacher's cache in 16 bits.
        """
        return int(self.amount * teacher if self.kind == "share" else self.amount)

    def keeps_all(self, nbytes: int, bits: int) -> UserError:
        """The answer to a budget that holds the `nbytes` of the whole cache in `bits` bits: not to convert."""
        how = f": deltanet-hf generate TEACHER --prompt TEXT --cache-bits {bits}" if bits < 16 else ""
        return UserError(
            f"{self.said}: holds the teacher's own cache in {bits} bits, {size(nbytes)}, and nothing is better for the "
            f"bytes; leave the model as it is{how}"
        )

    def too_small(self, smallest: int, what: str) -> UserError:
        """The error of a budget below the `smallest` bytes, which are those of `what`."""
        least = f"{self.said.removesuffix(self.text)}{-(-smallest // 1000)}KB@{self.at}"
        return UserError(f"{self.said}: too few bytes; the smallest budget is {least}, {what}")

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
            if memory is not None:
                raise self.keeps_all(memory.total(available, available), memory.bits)
            raise UserError(f"{self.said}: keeps all {available} units; leave at least one to convert")
        return found

    def _units_of_bytes(self, available: int, memory: Memory) -> int:
        allowed = self.allowed(memory.teacher)
        if memory.kept <= memory.other:
            raise UserError(
                f"{self.said}: at {memory.at} tokens the keys and values of a unit ({size(round(memory.kept))}) are "
                f"no larger than the cache in its place ({size(round(memory.other))}); give a larger length, or a "
                "--mixer with a state or a window"
            )
        smallest = memory.total(1, available)
        if allowed < smallest:
            raise UserError(
                f"{self.said}: {size(allowed)} are too few: the states alone are "
                f"{size(memory.total(0, available))}, with one unit kept {size(smallest)}; give a larger budget"
            )
        return min(available, int((allowed - memory.total(0, available)) / (memory.kept - memory.other) + 1e-9))
