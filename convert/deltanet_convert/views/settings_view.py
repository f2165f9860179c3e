"""`deltanet-hf convert --set help`: the mixers, and what their settings mean, read from the classes of the settings."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table

from deltanet_hf.mixers import MIXERS, WINDOW_SUFFIX
from deltanet_hf.mixers.layer.settings import MixerSettings
from deltanet_hf.mixers.mixed_heads import MixedHeads


def print_settings(console: Console) -> None:
    """Prints the names of `--mixer`, then the keys of `--set` with their values and meanings."""
    kinds = {name: kind for name, kind in MIXERS.items() if name != MixedHeads.name}
    mixers = Table("--mixer", "layer", "with a window", box=None, padding=(0, 2, 0, 0))
    for name, kind in kinds.items():
        mixers.add_row(name, kind.title, f"{name}{WINDOW_SUFFIX}" if kind.has_state else "")
    console.print(mixers, highlight=False)
    for settings in dict.fromkeys(each for kind in kinds.values() for each in _declaring(kind.Settings)):
        having = [name for name, kind in kinds.items() if issubclass(kind.Settings, settings)]
        all_states = having == [name for name, kind in kinds.items() if kind.has_state]
        console.print(f"\nOf {'every mixer with a state' if all_states else ', '.join(having)}:", highlight=False)
        keys = Table("--set", "values", "meaning", box=None, padding=(0, 2, 0, 0))
        for key, meaning in meanings(settings).items():
            keys.add_row(key, _values(get_type_hints(settings)[key]), meaning)
        console.print(keys, highlight=False, markup=False)


def meanings(settings: type[MixerSettings]) -> dict[str, str]:
    """The comment behind each field that the class itself declares: what the setting means."""
    return dict(re.findall(r"^    (\w+): [^\n#]*  # ([^\n]+)$", inspect.getsource(settings), re.MULTILINE))


def _declaring(settings: type[MixerSettings]) -> list[type[MixerSettings]]:
    """The classes that declare the settings, the most general one first."""
    return [each for each in reversed(settings.__mro__) if issubclass(each, MixerSettings) and own_keys(each)]


def own_keys(settings: type[MixerSettings]) -> list[str]:
    """The settings that the class itself declares."""
    return [key for key, kind in inspect.get_annotations(settings).items() if "ClassVar" not in kind]


def _values(kind: Any) -> str:
    """The values that a setting may have."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    return "true, false" if kind is bool else "a number"
