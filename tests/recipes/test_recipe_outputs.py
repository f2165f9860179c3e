"""What a run shows and leaves: the plan, progress, logs, trackers, plots and the model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest

from deltanet_recipes.config import load_recipe
from deltanet_recipes.logbook import read_log
from deltanet_recipes.pipeline import run
from tests.recipes.tiny_run import ALIGN, DISTIL, make_workplace, recipe_tree, write_recipe

STAGES = [{**ALIGN, "tokens": 128 * 4}, {**DISTIL, "tokens": 128 * 4}]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("outputs"))


class Tracker:
    """Takes from accelerate's place what a tracker would be given."""

    def __init__(self, log_with: list[str], project_dir: str) -> None:
        self.log_with, self.project_dir, self.ended = log_with, project_dir, False
        self.config: dict[str, Any] = {}
        self.points: list[tuple[int, dict[str, Any]]] = []

    def init_trackers(self, name: str, config: dict[str, Any]) -> None:
        self.config = config

    def log(self, values: dict[str, Any], step: int) -> None:
        self.points.append((step, values))

    def end_training(self) -> None:
        self.ended = True


def test_trackers_get_the_recipe_and_every_row(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tracker] = []
    monkeypatch.setattr(accelerate, "Accelerator", lambda **kwargs: made.append(Tracker(**kwargs)) or made[-1])
    tree = recipe_tree(workplace, STAGES, output=str(tmp_path / "run"), log={"every": 2, "trackers": ["tensorboard"]})
    with monkeypatch.context() as patch:  # whether it is installed here or not
        patch.setattr("importlib.util.find_spec", lambda name: name)
        recipe = load_recipe(write_recipe(tmp_path, tree))
    run(recipe)
    (tracker,) = made
    assert (tracker.log_with, tracker.project_dir, tracker.ended) == (["tensorboard"], str(tmp_path / "run"), True)
    assert tracker.config["stages.1.optimizer.mixer_lr"] == 3e-3
    assert all(isinstance(value, (bool, int, float, str)) for value in tracker.config.values())
    rows = read_log(tmp_path / "run")
    assert [step for step, _ in tracker.points] == [row["total_steps"] for row in rows] == [0, 2, 4, 4, 6, 8]
    assert tracker.points[-1][1]["distil/held_out.kl"] == rows[-1]["held_out.kl"]
