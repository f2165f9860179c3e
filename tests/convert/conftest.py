"""Settings of the tests of conversions."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deltanet_convert import output_files
from deltanet_convert.select import objectives, probes, run
from deltanet_convert.select.probe_text import FORMATS
from deltanet_convert.start import START, gate_fit
from support.far_model import far_folder
from support.tiny_conversion import quick_start


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


@pytest.fixture
def short_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts, probes of two formats, and plots that cost nothing."""
    monkeypatch.setattr(probes, "CHARACTERS", 2000)
    monkeypatch.setattr(objectives, "selection_probes", partial(probes.selection_probes, formats=FORMATS[:2]))
    monkeypatch.setattr(run, "selection_plot", lambda selection: b"plot")


@pytest.fixture(scope="session")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher in which one key/value head of one layer looks far."""
    return far_folder(tmp_path_factory.mktemp("teachers") / "far")


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits that take few steps among few values."""
    monkeypatch.setattr(gate_fit, "STEPS", 6)
    monkeypatch.setattr(gate_fit, "HALF_LIVES", (2.0, 64.0))
    monkeypatch.setattr(gate_fit, "STRENGTHS", (0.05, 0.5))


@pytest.fixture
def quick_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start values of Gated DeltaNet without a fit."""
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
