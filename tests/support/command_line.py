"""The command `deltanet-hf` within the process of a test."""

from __future__ import annotations

import sys

import pytest

from deltanet_recipes.cli import main


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of `deltanet-hf ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["deltanet-hf", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
