"""Runs on bad days: disks that fill up at every write, damaged checkpoints, NaN, outputs in use, lost processes."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.file_lock import locked
from deltanet_recipes.config import load_recipe
from deltanet_recipes.data import tokens
from deltanet_recipes.training import final_model, layerwise, pipeline, stages, training_state
from deltanet_recipes.training.checksums import (
    Damaged,
    SummedFile,
    check_sums,
    load_tensors,
    save_tensors,
    write_sums,
)
from deltanet_recipes.training.logbook import LOG, Logbook, read_log
from deltanet_recipes.training.peers import peers_alive
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.trainer import Trainer
from support.file_limit import limit_during
from support.tiny_run import ALIGN, DISTIL, LAYERS, make_workplace, recipe_tree, write_recipe

STAGES = [
    {**ALIGN, "mode": "layerwise", "tokens": 128 * 3, "cached_tokens": 256},
    {**DISTIL, "tokens": 128 * 7, "top_k": 8},
]


class Stop(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("models"))


def train(workplace: Path, out: Path, stages: list[dict[str, Any]], **changes: Any) -> str:
    """Run a recipe; returns what it printed."""
    tree = recipe_tree(workplace, stages, output=str(out), **changes)
    out.parent.mkdir(parents=True, exist_ok=True)
    said = io.StringIO()
    pipeline.run(load_recipe(write_recipe(out.parent, tree)), console=Console(file=said, width=1000))
    return said.getvalue()


def outcome(out: Path) -> tuple[list[tuple[str, int, float]], dict[str, torch.Tensor]]:
    """The losses in the log, by stage and step, and the final weights."""
    rows = [(row["stage"], row["step"], row["loss"]) for row in read_log(out) if "loss" in row]
    return rows, load_file(out / "final" / "model.safetensors")


def assert_same(out: Path, expected: Path) -> None:
    (rows, weights), (wanted_rows, wanted) = outcome(out), outcome(expected)
    assert sorted(rows) == sorted(wanted_rows)
    assert len(rows) == len(set(rows))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def stop_at(patch: pytest.MonkeyPatch, label: str, step: int) -> None:
    real = Trainer.optimiser_step

    def stopped(self: Trainer) -> Any:
        if (self.label, self.step) == (label, step):
            raise Stop
        return real(self)

    patch.setattr(Trainer, "optimiser_step", stopped)


@pytest.fixture(scope="module")
def expected(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("expected") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "draw_plots", lambda *args: [])
        train(workplace, out, STAGES)
    return out


# The function that writes, the largest size of its files meanwhile, and the calls that go well before. Small limits
# stop at the first file of a function, larger ones at a later file.
WRITES: list[tuple[Any, str, int, int]] = [
    (pipeline, "_claim", 10, 0),  # run.json
    (tokens, "_build", 100, 0),  # tokens.bin
    (layerwise, "reserve", 4096, 1),  # activations
    (Logbook, "write", 10, 0),
    (Logbook, "write", 700, 1),
    (training_state.torch, "save", 3000, 0),  # weights.pt, in the middle
    (training_state, "write_sums", 10, 0),
    (layerwise, "save_tensors", 500, 0),  # a finished mixer
    (Logbook, "truncate", 50, 0),
    (layerwise, "save_tensors", 500, 1),
    (pipeline, "save_stage", 500, 0),
    (Logbook, "tables", 20, 0),
    (stages, "write_cache", 1000, 0),
    (Logbook, "write", 3000, 3),
    (training_state.torch, "save", 3000, 1),
    (pipeline, "save_stage", 20_000, 0),
    (final_model, "publish_folder", 10, 0),  # its journal
    (pipeline, "save_final", 2000, 0),  # weights
    (final_model, "write_card", 100, 0),
    (pipeline, "draw_plots", 100, 0),
]


@pytest.mark.usefixtures("real_plots")
@pytest.mark.parametrize("writes", [WRITES[::4], pytest.param(WRITES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_full_disk_at_any_write_loses_nothing(
    writes: list[Any], workplace: Path, tmp_path: Path, expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, which each of the writes interrupts in turn."""
    out = tmp_path / "run"
    for owner, name, size, before in writes:
        with monkeypatch.context() as patch:
            limit_during(patch, owner, name, size, before)
            with pytest.raises(UserError, match=r"^[^\n]*the disk is full[^\n]*$") as caught:
                train(workplace, out, STAGES)
        assert str(out) in str(caught.value)
        left = [path.name for path in out.rglob("*") if path.suffix in (".partial", ".tmp") or path.name == "lock"]
        assert left == [], (name, left)
    train(workplace, out, STAGES)
    assert_same(out, expected)
    assert (out / "loss.png").is_file()


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
    with SummedFile(tmp_path / "weights.pt") as file:
        torch.save(values, file)
    write_sums(tmp_path, file)
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
    train(workplace, tmp_path / "other" / "run", NAN_STAGES)
    assert_same(tmp_path / "run", tmp_path / "other" / "run")


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


def test_an_output_in_use_is_refused(workplace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with (
        locked(out / "lock", out, "training run"),
        pytest.raises(UserError, match=r"another training run to .* is running"),
    ):
        train(workplace, out, NAN_STAGES)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38. It",
        "[../third_party/gloo/gloo/transport/tcp/buffer.cc:74] Timed out waiting 1800000ms for recv operation",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_the_loss_of_another_process_is_one_line(text: str) -> None:
    with (
        pytest.raises(UserError, match=r"^another process of this run has ended, [^\n]*run the same command") as caught,
        peers_alive(2),
    ):
        raise RuntimeError(text)
    assert "third_party" not in str(caught.value)
    with pytest.raises(RuntimeError), peers_alive(1):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), peers_alive(2):
        raise RuntimeError("shape mismatch")


def processes(recipe: Path, world: int = 2) -> list[subprocess.Popen[str]]:
    """The processes of a sharded run on CPUs, which talk by gloo, without a launcher that ends them together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "deltanet_recipes.distill", str(recipe), "engine.sharding=fsdp2"],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


@pytest.mark.slow
def test_a_killed_process_of_two_ends_the_other_and_the_run_resumes(workplace: Path, tmp_path: Path) -> None:
    """FSDP2 on CPUs. Either process is killed once; the run resumed twice equals one that nothing disturbed."""
    stages = [{**stage, "tokens": 128 * 24, "micro_batch_rows": 1} for stage in (ALIGN, DISTIL)]
    recipes = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tree = recipe_tree(workplace, stages, output=str(tmp_path / name / "run"))
        recipes[name] = write_recipe(tmp_path / name, tree)
    for process in processes(recipes["a"]):
        assert process.wait(timeout=200) == 0
    out = tmp_path / "b" / "run"
    for victim, stage in ((1, "align"), (0, "distil")):
        pair = processes(recipes["b"])
        while not any(row["stage"] == stage and row["step"] >= 5 for row in read_log(out)):
            assert all(process.poll() is None for process in pair)
            time.sleep(0.02)
        pair[victim].kill()
        _, errors = pair[1 - victim].communicate(timeout=60)
        assert pair[1 - victim].returncode == 2, errors
        assert "Traceback" not in errors
        assert errors.rstrip().rpartition("\n")[2].startswith("error: another process of this run has ended")
        pair[victim].communicate()
    for process in processes(recipes["b"]):
        assert process.wait(timeout=200) == 0
    assert_same(out, tmp_path / "a" / "run")
