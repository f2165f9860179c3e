"""The output of a run: plan, progress, logs, trackers, plots and model card."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from rich.console import Console
from safetensors.torch import load_file

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report.model_rows import training_tokens
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.pipeline import run
from support.tiny_run import ALIGN, DISTIL, losses, tiny_recipe

STAGES = [{**ALIGN, "tokens": 128 * 4}, {**DISTIL, "tokens": 128 * 4}]


class Tracker:
    """Stands in for accelerate and records what a tracker would be given."""

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


@pytest.fixture(scope="module")
def finished(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that read contaminated data, and the text it printed."""
    folder = tmp_path_factory.mktemp("finished")
    shared = json.loads((workplace / "text.jsonl").read_text().splitlines()[3])["text"]
    (folder / "quiz.jsonl").write_text(json.dumps({"question": shared}))
    data = {"decontaminate": [str(folder / "quiz.jsonl")]}
    shown = Console(file=io.StringIO(), width=200)
    run(tiny_recipe(workplace, folder / "run", *STAGES, data=data), console=shown)
    return folder / "run", shown.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_shows_its_plan_and_its_progress(finished: tuple[Path, str]) -> None:
    shown = finished[1]
    assert "1 of 120 documents dropped: they share 13 tokens with quiz.jsonl" in shown
    header = next(line for line in shown.splitlines() if "mixers" in line and "steps" in line)
    assert all(word in header for word in ("rest", "tokens", "memory", "time, about"))
    line = next(line for line in shown.splitlines() if line.startswith("distil 2/4"))
    assert all(word in line for word in ("loss", "kl", "tok/s", "GiB", "ETA"))


def test_names_of_folders_are_no_markup(workplace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "[bold]a[" / "b] :bug:"
    run(tiny_recipe(workplace, out, {**ALIGN, "tokens": 128, "name": "[b]"}))
    assert f"final model: {out}/final\n" in capfd.readouterr().err


def test_the_counts_of_the_data_are_in_the_run(finished: tuple[Path, str]) -> None:
    (counts,) = json.loads((finished[0] / "data.json").read_text())
    (dropped,) = counts["contaminated_by"].values()
    assert dropped == {"documents": 1, "tokens": counts["tokens_contaminated"]}
    assert counts["tokens_read"] - counts["tokens_contaminated"] == counts["tokens"]


def test_a_run_leaves_tables_and_pictures(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    final = folder / "final"
    assert (final / "model.safetensors").stat().st_mode == (final / "config.json").stat().st_mode
    rows = read_log(folder)
    for stage in ("align", "distil"):
        with open(folder / f"log.{stage}.csv", newline="") as file:
            table = list(csv.DictReader(file))
        own = [row for row in rows if row["stage"] == stage]
        assert [int(row["step"]) for row in table] == [row["step"] for row in own]
        assert [float(row["loss"]) for row in table[1:]] == [row["loss"] for row in own[1:]]
    assert all((folder / name).stat().st_size > 5000 for name in ("loss.png", "layers.png", "kl.png"))


def test_the_card_names_teacher_tokens_hours_scores_data_and_recipe(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    card = (folder / "final" / "README.md").read_text()
    held_out = [row["held_out.kl"] for row in read_log(folder) if "held_out.kl" in row]
    assert "# Gated DeltaNet student of teacher" in card
    assert "In all 1,024 training tokens and" in card
    assert "device hours" in card
    line = next(line for line in card.splitlines() if line.startswith("| distil | 512 |"))
    assert f"kl {held_out[0]:.4g}" in line
    assert f"kl {held_out[-1]:.4g}" in line
    assert "(1 of 120 documents dropped for sharing 13 tokens with quiz.jsonl)" in card
    settings = yaml.safe_load(card.partition("```yaml")[2].partition("```")[0])
    assert settings["stages"][1]["optimizer"] == DISTIL["optimizer"]
    kl = next(result for result in ModelCard(card).data.eval_results if result.metric_type == "kl_divergence")
    assert kl.metric_value == pytest.approx(held_out[-1], rel=1e-4)
    assert "The weights derive from `teacher`, whose files name no licence." in card


def test_the_card_names_only_the_stages_that_were_run(workplace: Path, tmp_path: Path) -> None:
    final = run(tiny_recipe(workplace, tmp_path / "run", *STAGES), ("align",))
    assert training_tokens(final) == STAGES[0]["tokens"]
    assert "distil" not in (final / "README.md").read_text().partition("```yaml")[2]


def test_distillation_goes_on_where_an_alignment_ended(workplace: Path, tmp_path: Path) -> None:
    recipes = {name: tiny_recipe(workplace, tmp_path / name / "run", *STAGES) for name in ("parts", "whole")}
    run(recipes["parts"], ("align",))
    files = [load_file(run(recipe) / "model.safetensors") for recipe in recipes.values()]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    assert losses(tmp_path / "parts" / "run") == losses(tmp_path / "whole" / "run")
    with pytest.raises(UserError, match=r"holds a run with another run \("):
        run(recipes["whole"], ("align",))


def test_an_output_that_cannot_be_is_one_line(workplace: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recipe = tiny_recipe(workplace, tmp_path / "run", *STAGES).model_copy(
        update={"output": str(tmp_path / "file" / "run")}
    )
    with pytest.raises(UserError, match=r"^output: [^\n]*cannot be written \(Not a directory\)[^\n]*$"):
        run(recipe)


@pytest.mark.parametrize(
    ("mode", "steps"), [("joint", [0, 2, 4, 4, 6, 8]), ("layerwise", [0, 2, 4, 4, 6, 8, 8, 10, 12, 12, 14, 16])]
)
def test_trackers_get_the_recipe_and_every_row_at_its_step(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, steps: list[int]
) -> None:
    made: list[Tracker] = []
    monkeypatch.setattr(accelerate, "Accelerator", lambda **kwargs: made.append(Tracker(**kwargs)) or made[-1])
    stages, log = [{**STAGES[0], "mode": mode}, STAGES[1]], {"every": 2, "trackers": ["tensorboard"]}
    with monkeypatch.context() as patch:  # as if every tracker were installed
        patch.setattr("importlib.util.find_spec", lambda name: name)
        recipe = tiny_recipe(workplace, tmp_path / "run", *stages, log=log)
    run(recipe)
    (tracker,) = made
    assert (tracker.log_with, tracker.project_dir, tracker.ended) == (["tensorboard"], str(tmp_path / "run"), True)
    assert tracker.config["stages.1.optimizer.mixer_lr"] == 3e-3
    assert all(isinstance(value, (bool, int, float, str)) for value in tracker.config.values())
    rows = read_log(tmp_path / "run")
    assert [step for step, _ in tracker.points] == [row["total_steps"] for row in rows] == steps
    assert tracker.points[-1][1]["distil/held_out.kl"] == rows[-1]["held_out.kl"]
