"""Damaged checkpoints are noticed and left out; NaN ends a run and never reaches a checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltanet_hf.errors import QualityError, UserError
from deltanet_recipes.training.checksums import Damaged, check_sums, load_tensors, save_tensors, write_sums
from deltanet_recipes.training.logbook import LOG, Logbook, read_log
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.trainer import Trainer
from support.fault_runs import STAGES, Stop, assert_same, stop_at, train, undisturbed
from support.tiny_run import DISTIL, LAYERS


@pytest.fixture(scope="module")
def expected(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(workplace, tmp_path_factory.mktemp("expected") / "run")


@pytest.fixture(scope="module")
def interrupted(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that stopped in its second stage, two steps behind its second checkpoint."""
    out = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, "distil", 5)
        with pytest.raises(Stop):
            train(workplace, out, STAGES)
    return out


def change_a_bit(file: Path, place: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    file.write_bytes(data)


LAST, BEFORE = "checkpoints/01-distil/step-00000004", "checkpoints/01-distil/step-00000002"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: change_a_bit(run / LAST / "weights.pt"), ["weights.pt is damaged", "after step 2"]),
        pytest.param(
            lambda run: change_a_bit(run / LAST / "state.json", 9),
            ["state.json is damaged", "after step 2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda run: os.truncate(run / LAST / "weights.pt", 5000),
            ["weights.pt is damaged", "after step 2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda run: (run / LAST / "SHA256SUMS").unlink(),
            ["SHA256SUMS cannot be read (No such file", "after step 2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda run: [change_a_bit(run / folder / "weights.pt") for folder in (LAST, BEFORE)],
            ["step-00000004: weights.pt", "step-00000002: weights.pt"],
            marks=pytest.mark.slow,
        ),
        (
            lambda run: change_a_bit(run / "stages" / "00-align.safetensors"),
            ["00-align.safetensors: is damaged", "the stage is trained again", "after step 4"],
        ),
    ],
    ids=["weights", "state", "cut", "no sums", "both", "stage"],
)
def test_damaged_checkpoints_are_left_out(
    damage: Callable[[Path], None], said: list[str], workplace: Path, tmp_path: Path, expected: Path, interrupted: Path
) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    assert sorted(path.name for path in (run / LAST).parent.iterdir()) == ["step-00000002", "step-00000004"]
    assert sorted(path.name for path in (run / LAST).iterdir()) == ["SHA256SUMS", "state.json", "weights.pt"]
    damage(run)
    printed = train(workplace, run, STAGES)
    assert all(part in printed for part in said), printed
    assert_same(run, expected)


@pytest.mark.slow
def test_a_damaged_mixer_is_trained_again(workplace: Path, tmp_path: Path, expected: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, f"align.{LAYERS - 1}", 1)
        with pytest.raises(Stop):
            train(workplace, out, STAGES)
    change_a_bit(out / "checkpoints" / "00-align" / "mixer-001.safetensors", -5)
    printed = train(workplace, out, STAGES)
    assert "mixer-001.safetensors: is damaged" in printed
    assert "mixer-000" not in printed
    assert_same(out, expected)


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    """200 single bits each: files with sums beside them, and safetensors files with a sum inside."""
    pick, values = random.Random(0), {"w": torch.randn(20, 3), "b": torch.zeros(4), "n": torch.tensor(3)}
    torch.save(values, tmp_path / "weights.pt")
    write_sums(tmp_path, ("weights.pt",))
    save_tensors(tmp_path / "w.safetensors", values, {"step": 1})
    loaded, note = load_tensors(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    assert note == {"step": 1}
    checks: list[tuple[Path, Callable[[], object]]] = [
        (tmp_path / "weights.pt", lambda: check_sums(tmp_path, ("weights.pt",))),
        (tmp_path / "w.safetensors", lambda: load_tensors(tmp_path / "w.safetensors")),
    ]
    for path, check in checks:
        whole = path.read_bytes()
        for _ in range(200):
            data = bytearray(whole)
            data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
            path.write_bytes(data)
            with pytest.raises(Damaged, match=r"^[^\n]{10,400}$"):
                check()
        path.write_bytes(whole)
        check()


def test_a_line_without_its_end_is_not_joined_with_the_next(tmp_path: Path) -> None:
    rows = [{"stage": "a", "step": 0}, {"stage": "a", "step": 1}]
    (tmp_path / LOG).write_text("\n".join(json.dumps(row) for row in rows))
    recipe: Any = SimpleNamespace(log=SimpleNamespace(trackers=()))
    logbook = Logbook(tmp_path, recipe, True)
    logbook.truncate("b", -1)
    row = {"stage": "b", "step": 0, "tokens_per_second": 1.0, "memory_gib": 0.0, "seconds_per_step": 0.0}
    logbook.write(row, 1)
    assert read_log(tmp_path) == [*rows, row]


def test_damaged_lines_of_a_log_are_left_out(tmp_path: Path) -> None:
    (tmp_path / LOG).write_bytes(b'\xff\x00\nnull\n[]\n{}\n{"stage": "a", "step": 0}\n')
    assert read_log(tmp_path) == [{"stage": "a", "step": 0}]


NAN_STAGES = [{**DISTIL, "tokens": 128 * 6}]


def test_nan_in_a_gradient_ends_the_run_and_never_reaches_a_checkpoint(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Runtime.sum_gradients, [0]

    def spoil(self: Runtime, parameters: list[torch.nn.Parameter]) -> None:
        real(self, parameters)
        calls[0] += 1
        if calls[0] == 4 and parameters[-1].grad is not None:
            parameters[-1].grad.flatten()[0] = torch.nan

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "sum_gradients", spoil)
        with pytest.raises(
            QualityError, match=r"before step 4 \(loss [\d.]+, but the norm .* is nan\); .*step-00000002"
        ):
            train(workplace, tmp_path / "run", NAN_STAGES)
    (folder,) = (tmp_path / "run" / "checkpoints" / "00-distil").iterdir()
    assert folder.name == "step-00000002"
    saved = torch.load(folder / "weights.pt", weights_only=True)
    assert all(value.isfinite().all() for value in saved["model"].values())
    train(workplace, tmp_path / "run", NAN_STAGES)  # nothing spoils it now
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert all(value.isfinite().all() for value in final.values())


@pytest.mark.parametrize(("step", "kept"), [(1, []), (5, ["step-00000002", "step-00000004"])])
def test_an_update_that_gives_nan_is_noticed_before_it_is_saved(
    step: int, kept: list[str], workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2 (a checkpoint) and 6 (the last one): no later step shows it in a loss."""
    real = Trainer.optimiser_step

    def spoil(self: Trainer) -> Any:
        found = real(self)
        if self.step == step:
            with torch.no_grad():
                self.parameters[0].flatten()[-1] = torch.inf
        return found

    monkeypatch.setattr(Trainer, "optimiser_step", spoil)
    with pytest.raises(QualityError, match=r"distil: training diverged .*a trained weight is not finite"):
        train(workplace, tmp_path / "run", NAN_STAGES)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoints/*/*")) == kept
    assert not (tmp_path / "run" / "stages").exists()


def test_nan_in_the_student_and_in_data_ends_with_one_line(workplace: Path, tmp_path: Path) -> None:
    student = shutil.copytree(workplace / "student", tmp_path / "student")
    weights = load_file(student / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QualityError, match=r"distil: training diverged before step 1 \(loss nan.*no checkpoint"):
        train(workplace, tmp_path / "run", NAN_STAGES, student=str(student), teacher=str(workplace / "teacher"))
    np.save(tmp_path / "ids.npy", np.array([1.0, np.nan, 3.0]))
    (tmp_path / "text.jsonl").write_text('{"text": NaN}\n')
    for file, message in (
        ("ids.npy", "expected one dimension of integers"),
        ("text.jsonl", "has no string under key 'text'"),
    ):
        sources = {"sources": [{"path": str(tmp_path / file)}]}
        with pytest.raises(UserError, match=message):
            train(workplace, tmp_path / f"with-{file}" / "run", NAN_STAGES, data=sources)
