"""A selection of key/value heads that stay softmax, as `deltanet-hf select --unit kv_head` writes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError

from .select.selection_file import FORMAT, MAX_BYTES, parse_selection


def selected_heads(spec: str, config: PreTrainedConfig) -> frozenset[tuple[int, int]] | None:
    """The (layer, key/value head) pairs that stay softmax, if `spec` names a selection of heads; otherwise None.

    Args:
        spec: the value of `--layers`.
        config: the teacher's.

    Raises:
        UserError: the selection was made for another model, or its heads make no sense.
    """
    path = Path(os.path.expanduser(spec))
    value = _contents(path)
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("unit") != "kv_head":
        return None
    where = f"--layers {path}"
    selection = parse_selection(value, where)
    selection.check_teacher(where, config)
    found = frozenset(selection.heads)
    if len(found) == selection.num_hidden_layers * selection.num_key_value_heads:
        raise UserError(f"{where}: keeps all {len(found)} heads; leave at least one to convert")
    return found


def _contents(path: Path) -> Any:
    """The file's JSON value; None for what is no such file, which the reader of lists of layers reports."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
