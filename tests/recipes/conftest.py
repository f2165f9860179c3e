"""Settings of the tests of recipes."""

from pathlib import Path

import pytest

from deltanet_recipes.training import pipeline, plan_view
from deltanet_recipes.training.run_plots import draw_plots
from support.tiny_run import make_workplace


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a teacher, its converted student and a text."""
    return make_workplace(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the plots at the end of a run, which take a fifth of the time of a tiny one."""
    monkeypatch.setattr(pipeline, "draw_plots", lambda folder, rows: None)


@pytest.fixture(autouse=True)
def no_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the matrix products that measure the machine, which take longer than a tiny run in bfloat16."""
    monkeypatch.setattr(plan_view, "_matmul_rate", lambda runtime: 1e11)


@pytest.fixture
def real_plots(no_plots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws the plots as users get them."""
    monkeypatch.setattr(pipeline, "draw_plots", draw_plots)
