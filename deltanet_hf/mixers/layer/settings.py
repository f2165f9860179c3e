"""The settings of a mixer: what config.json says of one kind of layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from transformers import PreTrainedConfig

Self = TypeVar("Self", bound="MixerSettings")


@dataclass(frozen=True)
class MixerSettings:
    """Base of the settings; a mixer's own ones are a frozen dataclass of bools, integers and names."""

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any], where: str = "deltanet") -> Self:
        """Read settings from JSON values.

        Args:
            values: the settings by name.
            where: what error messages call them.

        Raises:
            ValueError: a key is missing, unknown or has a wrong value; the message names it.
        """
        kept = {name: value for name, value in values.items() if (name, value) != ("late_writes", 0)}  # of old folders
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(set(kept) - set(known)):
            raise ValueError(f"{where}.{unknown[0]}: unknown key; known keys are {', '.join(sorted(known))}")
        required = {name for name, f in known.items() if f.default is MISSING}
        if missing := sorted(required - set(kept)):
            raise ValueError(f"{where}.{missing[0]}: missing key; add it to the config's `deltanet` entry")
        settings = cls(**kept)
        settings.validate(where)
        return settings

    def sized_for(self: Self, teacher: PreTrainedConfig) -> Self:
        """The same for a teacher of this size."""
        return self

    def with_window(self: Self, window: int) -> Self:
        """The same with a window of so many tokens, for mixers that have one."""
        changes: dict[str, Any] = {"window": window}
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    def validate(self, where: str) -> None:
        """Raise ValueError for the first value that is not allowed: here those of fields that are a bool or a name."""
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                check_choice(where, name, getattr(self, name), get_args(hint))
            elif hint is bool and not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{where}.{name}: got {value!r}, expected true or false")


def check_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{where}.{name}: got {value!r}, expected one of {', '.join(choices)}")


def check_at_least(where: str, name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{where}.{name}: got {value!r}, expected a whole number of at least {least}")
