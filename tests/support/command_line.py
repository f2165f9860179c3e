"""The command `deltanet-hf` within the process of a test."""

from __future__ import annotations

import sys

import pytest

from deltanet_recipes.cli import main


class CommandLine:
    """A call returns the exit status of `deltanet-hf ARGUMENTS` and keeps what it printed as `out` and `err`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self.capsys.readouterr()  # what came before
        self.monkeypatch.setattr(sys, "argv", ["deltanet-hf", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
        finally:
            self.out, self.err = self.capsys.readouterr()
        return 0
