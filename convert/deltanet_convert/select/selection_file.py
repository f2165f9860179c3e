"""The file that `deltanet-hf select` writes and `deltanet-hf convert --keep FILE` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltanet_hf.errors import UserError

from .units import UNITS, Unit, to_json, whole_heads

if TYPE_CHECKING:  # the help of a command imports no transformers
    from transformers import PreTrainedConfig

FORMAT = "deltanet-hf selection 1"
PLANNED = "deltanet-hf selection 3"  # with the key `planned_windows`
MAX_BYTES = 20_000_000


@dataclass(frozen=True)
class Selection:
    """The units of a teacher that stay softmax.

    Attributes:
        teacher: its folder's name or hub id.
        unit: "layer" or "kv_head".
        method: how they were chosen.
        budget: the budget in the user's words.
        kept: (layer,) or (layer, head), ascending.
        order: the same units, the most important one first.
        scores: what was measured.
        settings: window, sinks and probes with which it was measured.
        local: layers with the family's own sliding window, ascending; they stay softmax too.
        planned_windows: tokens that what is not kept sees, by layer; None where a conversion says it.
    """

    teacher: str
    model_type: str
    num_hidden_layers: int
    num_key_value_heads: int
    unit: str
    method: str
    budget: str
    seed: int
    kept: tuple[Unit, ...]
    order: tuple[Unit, ...]
    scores: Mapping[str, Any]
    settings: Mapping[str, Any]
    local: tuple[int, ...] = ()
    planned_windows: tuple[int, ...] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that stay softmax, ascending; ValueError for a selection of heads."""
        if self.unit != "layer":
            raise ValueError(f"unit: got {self.unit!r}, which names heads and not layers; use `heads`")
        return tuple(sorted({unit[0] for unit in self.kept} | {*self.local}))

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The key/value heads that stay softmax as (layer, head), ascending; of a whole layer, all of its heads."""
        whole = whole_heads(self.kept, self.local, self.num_key_value_heads)
        return tuple((layer, head) for layer, heads in whole.items() for head in heads)

    def to_json(self) -> dict[str, Any]:
        """The contents of the file."""
        lists = {"kept": [to_json(unit) for unit in self.kept], "order": [to_json(unit) for unit in self.order]}
        value = {"format": FORMAT, **asdict(self), **lists, "local": list(self.local)}
        if self.planned_windows is None:
            del value["planned_windows"]
            return value
        return {**value, "format": PLANNED, "planned_windows": list(self.planned_windows)}


def read_selection(path: str | Path) -> Selection:
    """Reads a selection file.

    Raises:
        UserError: the file cannot be read, or a key is missing or wrong; the message names file and key.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path}: too large for a selection; give the file that deltanet-hf select wrote")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the file that deltanet-hf select wrote") from error
    return parse_selection(value, str(path))


def file_selection(spec: str, config: PreTrainedConfig) -> Selection | None:
    """The selection in the file that `spec` names; None if it names no file of `deltanet-hf select`.

    Args:
        spec: the value of `--keep`.
        config: the teacher's.

    Raises:
        UserError: the selection was made for another model, or makes no sense.
    """
    path = Path(os.path.expanduser(spec))
    value = _contents(path)
    if not isinstance(value, dict) or "format" not in value:
        return None
    where = f"--keep {path}"
    selection = parse_selection(value, where)
    for key in ("model_type", "num_hidden_layers", "num_key_value_heads"):
        found, wanted = getattr(selection, key), getattr(config, key)
        if found != wanted:
            raise UserError(
                f"{where}: key '{key}' is {found!r}, the teacher's is {wanted!r}; give the selection that was made for "
                "this teacher"
            )
    layers, heads = selection.num_hidden_layers, selection.num_key_value_heads
    if len(selection.heads) == layers * heads:
        everything = f"{layers} layers" if selection.unit == "layer" else f"{layers * heads} heads"
        raise UserError(f"{where}: keeps all {everything}; leave at least one to convert")
    return selection


def _contents(path: Path) -> Any:
    """The file's JSON value; None for what is no such file, which the reader of lists of layers reports."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def parse_selection(value: Any, where: str) -> Selection:
    """Reads the contents of a selection file; see `read_selection`. `where` begins the messages."""
    if not isinstance(value, dict) or value.get("format") not in (FORMAT, PLANNED):
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise UserError(f"{where}: key 'format' is {found!r}, expected '{FORMAT}'; run deltanet-hf select again")
    lists = ("kept", "order", "local", "planned_windows")
    types: dict[str, type] = {**dict.fromkeys(lists, list), "scores": dict, "settings": dict}
    numbers = ("num_hidden_layers", "num_key_value_heads", "seed")
    types |= {
        field.name: int if field.name in numbers else str for field in fields(Selection) if field.name not in types
    }
    if value["format"] == FORMAT:
        del types["planned_windows"]
    found = {"scores": {}, "settings": {}, "local": [], **value}
    for key, kind in types.items():
        if type(found.get(key)) is not kind:
            raise UserError(f"{where}: key '{key}' is {found.get(key)!r:.60}, expected a JSON {_json_name(kind)}")
    kind = found["settings"].get("kind", {"mixer": ""})
    if not isinstance(kind, dict) or not isinstance(kind.get("mixer"), str):
        raise UserError(f"{where}: key 'settings.kind' is {kind!r:.60}, expected the settings of a mixer")
    if found["unit"] not in UNITS:
        raise UserError(f"{where}: key 'unit' is {found['unit']!r:.60}, expected one of {', '.join(UNITS)}")
    for key in ("num_hidden_layers", "num_key_value_heads"):
        if found[key] < 1:
            raise UserError(f"{where}: key '{key}' is {found[key]}, expected at least 1")
    windows = found["planned_windows"] if "planned_windows" in types else None
    if windows is not None and (
        len(windows) != found["num_hidden_layers"] or any(type(window) is not int or window < 1 for window in windows)
    ):
        raise UserError(f"{where}: key 'planned_windows' is {windows!r:.60}, expected tokens by layer")
    kept, order = (_units(found, key, where) for key in ("kept", "order"))
    local = [unit[0] for unit in _units({**found, "unit": "layer"}, "local", where)]
    if both := {unit[0] for unit in kept} & {*local}:
        raise UserError(
            f"{where}: keys 'kept' and 'local' both list layers {sorted(both)}; run deltanet-hf select again"
        )
    if not kept and windows is None:
        raise UserError(f"{where}: key 'kept' lists nothing; say --keep none to convert every layer")
    if sorted(order) != sorted(kept):
        raise UserError(f"{where}: keys 'order' and 'kept' list different units; run deltanet-hf select again")
    units = {"kept": tuple(sorted(kept)), "order": tuple(order), "local": tuple(sorted(local))}
    planned = {"planned_windows": None if windows is None else tuple(windows)}
    values = {key: found[key] for key in types} | units | planned
    return Selection(**values)


def _units(value: dict[str, Any], key: str, where: str) -> list[Unit]:
    """The units under `key`, each of which exists and is listed once."""
    sizes = (value["num_hidden_layers"], value["num_key_value_heads"])[: 1 if value["unit"] == "layer" else 2]
    example = "a layer index" if len(sizes) == 1 else "[layer, key/value head]"
    units: list[Unit] = []
    for item in value[key]:
        parts = [item] if len(sizes) == 1 else item
        if not isinstance(parts, list) or len(parts) != len(sizes) or any(type(part) is not int for part in parts):
            raise UserError(f"{where}: key '{key}' holds {item!r:.60}, expected {example}")
        if any(not 0 <= part < size for part, size in zip(parts, sizes, strict=True)):
            raise UserError(f"{where}: key '{key}' holds {item!r}, which the model does not have")
        units.append(tuple(parts))
    if len(set(units)) != len(units):
        raise UserError(f"{where}: key '{key}' lists a unit twice; list each once")
    return units


def _json_name(kind: type) -> str:
    return {list: "list", dict: "object", int: "whole number", str: "string"}[kind]
