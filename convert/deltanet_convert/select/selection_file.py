"""The file that `deltanet-hf select` writes and `deltanet-hf convert --keep FILE` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from deltanet_hf.errors import UserError

from .units import UNITS, Unit, to_json, whole_heads

if TYPE_CHECKING:  # the help of a command imports no transformers
    from transformers import PreTrainedConfig

FORMAT = "deltanet-hf selection 1"
PLANNED = "deltanet-hf selection 3"  # with the key `planned_windows`
MAX_BYTES = 20_000_000
REMEDY = "give the file that deltanet-hf select wrote"


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
            raise UserError(f"{path}: too large for a selection; {REMEDY}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {REMEDY}") from error
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
    given = {"scores": {}, "settings": {}, "local": (), **value}
    if value["format"] == FORMAT:
        given["planned_windows"] = None
    try:
        if given["unit"] == "layer":
            given |= {key: [(layer,) for layer in given[key]] for key in ("kept", "order")}
        found = TypeAdapter(Selection).validate_python(given)
        _check(found, planned=value["format"] == PLANNED)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{where}: key '{first['loc'][0]}': {first['msg']}; {REMEDY}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: a key is missing or wrong ({error}); {REMEDY}") from error
    return replace(found, kept=tuple(sorted(found.kept)), local=tuple(sorted(found.local)))


def _check(found: Selection, planned: bool) -> None:
    """Raises ValueError for a selection that no model has."""
    layers, windows = found.num_hidden_layers, found.planned_windows
    sizes = (layers, found.num_key_value_heads)[: 1 + UNITS.index(found.unit)]
    for unit, limits in (*[(unit, sizes) for unit in found.kept], *[((layer,), (layers,)) for layer in found.local]):
        if len(unit) != len(limits) or any(not 0 <= part < size for part, size in zip(unit, limits, strict=True)):
            raise ValueError(f"'kept' or 'local' holds {unit}, which the model does not have")
    if len({*found.kept}) != len(found.kept) or sorted(found.order) != sorted(found.kept):
        raise ValueError("'kept' and 'order' do not list the same units once each")
    if {unit[0] for unit in found.kept} & {*found.local}:
        raise ValueError("'kept' and 'local' list the same layer")
    if not found.kept and not planned:
        raise ValueError("'kept' lists nothing; say --keep none to convert every layer")
    if planned and (windows is None or len(windows) != layers or min(windows) < 1):
        raise ValueError("'planned_windows' are not tokens by layer")
    if not isinstance(found.settings.get("kind", {"mixer": ""})["mixer"], str):
        raise ValueError("'settings.kind' are not the settings of a mixer")
