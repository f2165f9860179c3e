"""Chooses which layers, or which key/value heads, of a teacher stay softmax: `deltanet-hf select`."""

from .selection_file import Selection, read_selection

__all__ = ["Selection", "read_selection"]
