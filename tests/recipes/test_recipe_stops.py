"""Runs that end early or go on, as a user sees them: Ctrl-C, a student that becomes worse, a run that is resumed."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from deltanet_hf.errors import QualityError, UserError
from deltanet_recipes import command
from deltanet_recipes.config import load_recipe
from deltanet_recipes.training import pipeline, trainer
from support.tiny_models import READS_ALL
from support.tiny_run import ALIGN, DISTIL, losses, make_workplace, recipe_tree, write_recipe

LAYERWISE = {**ALIGN, "mode": "layerwise", "cached_tokens": 512}
TOO_HIGH = {"mixer_lr": 0.05, "projection_lr": 0.05, "warmup": 0.0}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(
        tmp_path_factory.mktemp("models"), layers=(0, 2), mixer="gated_deltanet+window", window=8, **READS_ALL
    )


def recipe_file(workplace: Path, folder: Path, stages: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    return write_recipe(folder, recipe_tree(workplace, stages, output=str(folder / "run")))


def run(recipe: Path, *overrides: str) -> str:
    """The lines that the run prints."""
    console = Console(file=io.StringIO(), width=300)
    try:
        pipeline.run(load_recipe(recipe, overrides), console=console)
    finally:
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, at: int, times: int) -> None:
    """Presses Ctrl-C while the step `at` of the first stage or layer is done."""
    step, left = trainer.Trainer.optimiser_step, [times]

    def pressed(self: trainer.Trainer) -> Any:
        while self.step == at and left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(trainer.Trainer, "optimiser_step", pressed)


@pytest.mark.parametrize(
    ("stage", "at"), [(LAYERWISE, 4), (LAYERWISE, 11), (DISTIL, 4)], ids=["layerwise", "last step of a layer", "distil"]
)
def test_ctrl_c_keeps_the_step_and_the_run_goes_on_to_the_same_losses(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: dict[str, Any], at: int
) -> None:
    stages = [stage, {**DISTIL, "name": "after", "tokens": 128 * 2}]
    expected = recipe_file(workplace, tmp_path / "a", stages)
    run(expected)
    stopped = recipe_file(workplace, tmp_path / "b", stages)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, at, times=1)
        with pytest.raises(KeyboardInterrupt, match=r"stopped after step 5, with a checkpoint|stopped before step 1"):
            run(stopped)
    assert signal.getsignal(signal.SIGINT) is handler
    assert losses(stopped.parent / "run")[-1][1] == at + 1
    run(stopped)
    assert losses(stopped.parent / "run") == losses(expected.parent / "run")


def test_a_run_out_of_memory_goes_on_with_smaller_micro_batches(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [ALIGN, {**DISTIL, "name": "after"}]
    expected = recipe_file(workplace, tmp_path / "a", stages)
    run(expected)
    stopped = recipe_file(workplace, tmp_path / "b", stages)
    step = trainer.Trainer.optimiser_step

    def full(self: trainer.Trainer) -> Any:
        if self.label == "after" and self.step == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "optimiser_step", full)
        with pytest.raises(UserError, match=r"^after: CUDA out of memory\. .* GiB\. To go on, lower"):
            run(stopped, "log.checkpoint_every=4")
    changed = ["stages.0.micro_batch_rows=1", "stages.1.micro_batch_rows=1", "stages.1.loss_chunk=16"]
    assert "finished before: align; goes on with after" in run(stopped, "log.checkpoint_every=4", *changed)
    for one, other in zip(losses(stopped.parent / "run"), losses(expected.parent / "run"), strict=True):
        assert one == (*other[:2], pytest.approx(other[2], rel=1e-5))


def test_a_second_ctrl_c_ends_at_once(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_file(workplace, tmp_path, [ALIGN])
    press_ctrl_c(monkeypatch, at=0, times=2)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    assert not losses(recipe.parent / "run")


def test_after_ctrl_c_one_line_has_the_command_that_goes_on(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_file(workplace, tmp_path, [ALIGN])
    press_ctrl_c(monkeypatch, at=2, times=1)
    with pytest.raises(typer.Exit) as ended:
        command.distill(recipe, ["data.separator=2", "seed=3"])
    assert ended.value.exit_code == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "align: stopped after step 3, with a checkpoint; go on with: "
        f"deltanet-hf distill {recipe} data.separator=2 seed=3"
    )


@pytest.mark.parametrize("stage", [LAYERWISE, DISTIL], ids=["layerwise", "distil"])
def test_a_stage_that_makes_the_student_worse_stops_unless_told_otherwise(
    workplace: Path, tmp_path: Path, stage: dict[str, Any]
) -> None:
    recipe = recipe_file(workplace, tmp_path, [{**stage, "optimizer": TOO_HIGH}])
    for _ in range(2):  # the same command finds it again, and does not train on
        with pytest.raises(QualityError, match=r"makes the student worse.*mixer_lr.*projection_lr") as problem:
            run(recipe, "log.evaluate_every=4")
        assert losses(recipe.parent / "run")[-1][1] == 4
    assert "log.stop_when_worse=false" in str(problem.value)
    run(recipe, "log.evaluate_every=4", "log.stop_when_worse=false")
    assert losses(recipe.parent / "run")[-1][1] == 12


def test_rounding_errors_and_steps_without_a_scored_token_are_no_yardstick(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss is 0, and the held-out loss of a student that equals its teacher may be below it."""
    recipe, step = recipe_file(workplace, tmp_path, [DISTIL]), trainer.Trainer.optimiser_step

    def no_loss_at_first(self: trainer.Trainer) -> Any:
        metrics, norm = step(self)
        return metrics * (self.step > 0), norm

    monkeypatch.setattr(trainer.Trainer, "optimiser_step", no_loss_at_first)
    monkeypatch.setattr(trainer.Trainer, "_held_out", lambda self: {trainer.HELD_OUT_LOSS: -3e-9})
    run(recipe, "log.evaluate_every=4")
    assert losses(recipe.parent / "run")[-1][1] == 12


def test_rates_that_a_student_with_windows_needs_are_asked_for(workplace: Path, tmp_path: Path) -> None:
    rates = {"mixer_lr": 1e-3, "share_lr": 1e-3}
    bare = recipe_file(workplace, tmp_path / "a", [ALIGN, {**DISTIL, "optimizer": {**rates, "rest_lr": 1e-4}}])
    assert "\nalign: the student has windows" in run(bare)
    complete = recipe_file(workplace, tmp_path / "b", [{**ALIGN, "optimizer": rates}])
    assert "the student has windows" not in run(complete)
    pure = recipe_file(make_workplace(tmp_path), tmp_path / "c", [ALIGN])
    assert "the student has windows" not in run(pure)


def test_a_resumed_run_says_what_is_finished_and_plans_only_the_rest(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(workplace, tmp_path, [ALIGN, DISTIL])
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, at=11, times=1)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    text = run(recipe)
    assert "finished before: align; goes on with distil\n" in text
    plan = text[text.index("steps x tokens") : text.index("distil: loads")]
    assert "distil" in plan
    assert "align" not in plan
    again = run(recipe)
    assert "finished before: align, distil; only the final model is written\n" in again
    assert "steps x tokens" not in again


def test_a_log_shows_slow_steps_between_its_lines(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(workplace, tmp_path, [ALIGN])
    monkeypatch.setattr("deltanet_recipes.training.logbook.SILENCE", 0.0)
    lines = run(recipe, "log.every=100").splitlines()
    assert [f"align {step}/12" in lines for step in range(1, 12)] == [True] * 11
