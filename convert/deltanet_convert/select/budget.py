"""How much a selection may keep: a number of units, a share of them, or bytes per sequence at a length."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deltanet_hf.errors import UserError
from deltanet_hf.token_count import parse_tokens

from ..command_options import parse_size
from ..options import AUTO
from ..views.plan_view import size
from .units import Candidates, evenly

if TYPE_CHECKING:
    from .cache_sizes import CacheSizes

USUAL_SHARE = "11%@2k"  # of the teacher's bytes: the point that the front recommends (docs/results.md)


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
    def parse(cls, text: str) -> Budget:
        """Parses '7' or '25%' of the units, '40MB@32k' (bytes of a sequence) or '5%@32k' (of the teacher's bytes).

        A length may be given in tokens or, as '32k', in 1,024 of them.
        """
        said = f"--keep {text}"
        amount, separator, length = text.partition("@")
        at = parse_tokens(length, said) if separator else None
        if share := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", amount, re.ASCII):
            return cls(float(share[1]) / 100, "share", at, text, said)
        if at is not None:
            return cls(parse_size(amount, said), "bytes", at, text, said)
        if not re.fullmatch(r"\d{1,9}", amount, re.ASCII):
            raise UserError(
                f"{said}: expected a number of units such as 7, a share such as 25%, 40MB@32k, or auto; what names "
                "layers itself is for deltanet-hf convert"
            )
        return cls(int(amount), "count", None, text, said)

    @classmethod
    def usual(cls, candidates: Candidates, plans_windows: bool) -> Budget:
        """The budget of `--keep auto`.

        A ninth of the teacher's bytes where windows can be planned; else a quarter of the units, or beside layers that
        slide half, or facts are lost that pass from one global layer to the next (Gemma 3 270M, docs/selecting.md).
        """
        count = len(candidates.units)
        text = str(-(-count // 2) if candidates.local else max(1, count // 4))
        if plans_windows and not candidates.local:
            text = USUAL_SHARE
        return replace(cls.parse(text), said=f"--keep {AUTO}, {text}")

    def units(self, candidates: Candidates) -> int:
        """How many units a number or share of them keeps.

        Raises:
            UserError: none, all, or more than there are.
        """
        available = len(candidates.units)
        found = int(self.amount if self.kind == "count" else self.amount * available + 1e-9)
        if found < 1:
            raise UserError(f"{self.said}: keeps none of the {available} units; give a larger budget")
        if found > available:
            raise UserError(f"{self.said}: there are only {available} units; give a smaller budget")
        if found == available:
            raise UserError(f"{self.said}: keeps all {available} units; leave at least one to convert")
        return found

    def units_of_bytes(self, sizes: CacheSizes, shortest: int | None = None) -> int:
        """How many units a budget in bytes keeps: as many as fit, evenly spread where their sizes differ.

        Args:
            sizes: of caches at the budget's length.
            shortest: tokens of the shortest window of all other units, where windows are planned; then a budget may
                keep no unit.

        Raises:
            UserError: the budget is too small, or holds the teacher's own cache, or that is no larger than the
                converted model's.
        """
        units, allowed = sizes.candidates.units, self.allowed(sizes)

        def total(count: int) -> int:
            windows = None if shortest is None else [shortest] * sizes.teacher.num_layers
            return sizes.total(evenly(units, count), windows)

        none, one, whole = total(0), total(1), total(len(units))
        if whole <= none:
            raise UserError(
                f"{self.said}: at {sizes.at} tokens the keys and values of a unit are no larger than the cache in its "
                f"place (of all, {size(whole)} and {size(none)}); give a larger length, or a --mixer with a state or a "
                "window"
            )
        if whole <= allowed:
            answers = {
                16: "leave the model as it is",
                8: "leave the model as it is: deltanet-hf generate TEACHER --prompt TEXT --cache-bits 8",
                4: "keep every layer: deltanet-hf convert TEACHER OUT --keep every:1",
            }
            raise UserError(
                f"{self.said}: holds the teacher's own cache in {sizes.bits} bits, {size(whole)}, and nothing is "
                f"better for the bytes; {answers[sizes.bits]}"
            )
        least, what = (none, f"a window of {shortest} tokens in all heads") if shortest else (one, "one whole unit")
        if allowed < least:
            smallest = f"--keep {-(-least // 1000)}KB@{self.at}"
            raise UserError(f"{self.said}: too few bytes; the smallest budget is {smallest}, {what}")
        return next(count for count in reversed(range(len(units))) if total(count) <= allowed)

    def allowed(self, sizes: CacheSizes) -> int:
        """The bytes that a budget in bytes allows."""
        return int(self.amount * sizes.teacher_bytes if self.kind == "share" else self.amount)
