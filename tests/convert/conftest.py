"""Settings of the tests of conversions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deltanet_convert import output_files


@pytest.fixture(autouse=True)
def quick_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the figures instead of a plot, which would take longer than a tiny conversion."""

    def written(layers: Sequence[Mapping[str, Any]], path: Path) -> None:
        path.write_bytes(json.dumps(layers).encode())

    monkeypatch.setattr(output_files, "layer_error_plot", written)


@pytest.fixture
def real_plot(quick_plot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the plot as users get it."""
    from deltanet_convert.views.layer_error_plot import layer_error_plot

    monkeypatch.setattr(output_files, "layer_error_plot", layer_error_plot)
