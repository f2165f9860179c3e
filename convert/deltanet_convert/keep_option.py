"""`--keep`: which layers, or key/value heads, of the teacher keep softmax attention."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError, did_you_mean
from deltanet_hf.models.layers import LayerTable

from .options import AUTO, ConvertOptions
from .select.for_convert import auto_selection
from .select.run import Show
from .select.selection_file import Selection, file_selection
from .teacher_model import Teacher

MAX_LIST_BYTES = 1_000_000


def check_keep(options: ConvertOptions) -> None:
    """Raises UserError for a value that is neither in the option's grammar nor a file."""
    spec = options.keep
    if options.automatic or spec == "none" or spec.startswith(("every:", "layers:")):
        return
    if not os.path.exists(os.path.expanduser(spec)):  # False also for what no file can be called
        _, colon, rest = spec.partition(":")
        meant = did_you_mean(spec, (AUTO, "none", f"every{colon}{rest}", f"layers{colon}{rest}"))
        raise UserError(
            f"--keep: got '{spec}'{meant}; expected {AUTO}, 40MB@32k, 5%@16k, 25%, 7, every:N, layers:3,7,11, none or "
            "an existing file"
        )


def chosen_layers(teacher: Teacher, out: Path, options: ConvertOptions, show: Show) -> tuple[int, ...] | Selection:
    """The layers that `--keep` names, by index, or the selection that a budget makes or a file holds.

    Args:
        out: the folder that will be made; an automatic selection is kept beside it until then.
        show: called with the progress of an automatic selection.

    Raises:
        UserError: the value cannot be used, or does not fit the teacher or the other options.
    """
    if not options.automatic:
        return file_selection(options.keep, teacher.config) or softmax_layers(options.keep, teacher.num_layers)
    return auto_selection(teacher, out, options, show)


def table_of(options: ConvertOptions, kept: Iterable[int] | Selection, teacher: PreTrainedConfig) -> LayerTable:
    """The layer table for a teacher, of which these layers, or the units of a selection, keep their attention.

    The windows that a selection plans are those of the mixer, if it has windows and `--set` gives none.
    """
    if not isinstance(kept, Selection):
        return options.table(int(teacher.num_hidden_layers), kept, teacher)  # type: ignore[attr-defined]
    layers, heads = kept.num_hidden_layers, kept.num_key_value_heads
    if kept.unit == "kv_head":
        table = options.head_table(layers, heads, frozenset(kept.heads), teacher)
    else:
        table = options.table(layers, kept.layers, teacher)
    if kept.planned_windows is None or not options.takes_windows:
        return table
    return table.with_windows(kept.planned_windows)


def softmax_layers(spec: str, num_layers: int) -> tuple[int, ...]:
    """Indices of the layers that keep softmax attention, ascending.

    Args:
        spec: `none`, `every:N` (layers N-1, 2N-1, ...), `layers:3,7,11`, or a file that lists the layers: a JSON list,
            or numbers separated by commas or white space ('#' begins a comment). A budget is spent in
            `select/for_convert.py`, and what `deltanet-hf select` wrote is read by `file_selection`.
        num_layers: the teacher's number of decoder layers.

    Raises:
        UserError: the specification or the file cannot be read, or names layers that do not exist.
    """
    if spec == "none":
        return ()
    if spec.startswith("every:"):
        return _every(spec, num_layers)
    if spec.startswith("layers:"):
        return _check_indices(f"--keep {spec}", _numbers(spec.removeprefix("layers:"), "--keep"), num_layers)
    path = Path(os.path.expanduser(spec))
    return _check_indices(f"--keep {path}", _from_file(path), num_layers)


def _every(spec: str, num_layers: int) -> tuple[int, ...]:
    value = spec.removeprefix("every:")
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or int(value) < 1:
        raise UserError(f"--keep {spec}: N has to be a whole number of at least 1")
    step = int(value)
    if step > num_layers:
        raise UserError(f"--keep {spec}: keeps none of the {num_layers} layers; say none, or a smaller N")
    return tuple(range(step - 1, num_layers, step))


def _numbers(text: str, where: str) -> list[int]:
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for word in words:
        if not re.fullmatch(r"-?\d{1,9}", word, re.ASCII):
            raise UserError(f"{where}: '{word:.60}' is not a layer index; list whole numbers such as 3,7,11")
    return [int(word) for word in words]


def _from_file(path: Path) -> list[int]:
    where = f"--keep {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)  # a device has no size
        if len(data) > MAX_LIST_BYTES:
            raise UserError(f"{where}: too large for a list of layers; give a JSON list such as [3, 7, 11]")
        return _numbers(re.sub(r"#.*|^\s*\[|\]\s*$", " ", data.decode()), where)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({error}); give a text file of layer indices") from error


def _check_indices(where: str, indices: list[int], num_layers: int) -> tuple[int, ...]:
    if not indices:
        raise UserError(f"{where}: lists no layer; say --keep none to convert every one")
    for index in indices:
        if not 0 <= index < num_layers:
            raise UserError(f"{where}: layer {index} does not exist; the teacher has layers 0 to {num_layers - 1}")
        if indices.count(index) > 1:
            raise UserError(f"{where}: layer {index} is listed twice; list each kept layer once")
    return tuple(sorted(indices))
