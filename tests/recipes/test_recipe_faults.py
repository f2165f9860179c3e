"""Runs on bad days: disks that fill up at every write, outputs in use, processes that are lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deltanet_hf.errors import UserError
from deltanet_hf.file_lock import locked
from deltanet_recipes.data import tokens
from deltanet_recipes.training import final_model, layerwise, pipeline, training_state
from deltanet_recipes.training.logbook import Logbook, read_log
from deltanet_recipes.training.peers import peers_alive
from support.fault_runs import STAGES, assert_same, train, undisturbed
from support.file_limit import limit_during
from support.tiny_run import ALIGN, DISTIL, recipe_tree, write_recipe


@pytest.fixture(scope="module")
def expected(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(workplace, tmp_path_factory.mktemp("expected") / "run")


# The function that writes, the largest size of its files meanwhile, and the calls that go well before. Small limits
# stop at the first file of a function, larger ones at a later file.
WRITES: list[tuple[Any, str, int, int]] = [
    (pipeline, "_claim", 10, 0),  # run.json
    (tokens, "_build", 100, 0),  # tokens.bin
    (layerwise, "reserve", 4096, 1),  # activations
    (Logbook, "write", 10, 0),
    (pipeline, "show_plan", 100, 0),
    (Logbook, "write", 700, 1),
    (training_state.torch, "save", 3000, 0),  # weights.pt, in the middle
    (training_state, "write_sums", 10, 0),
    (layerwise, "save_tensors", 500, 0),  # a finished mixer
    (Logbook, "truncate", 50, 0),
    (layerwise, "save_tensors", 500, 1),
    (pipeline, "save_stage", 500, 0),
    (Logbook, "tables", 20, 0),
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


def test_an_output_in_use_is_refused(workplace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with (
        locked(out / "lock", out, "training run"),
        pytest.raises(UserError, match=r"another training run to .* is running"),
    ):
        train(workplace, out, STAGES)
    assert not out.exists()


def test_the_loss_of_another_process_is_one_line() -> None:
    said = r"^another process of this run has ended, [^\n]*run the same command"
    for text in (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38. It",
        "[../third_party/gloo/gloo/transport/tcp/buffer.cc:74] Timed out waiting 1800000ms for recv operation",
        "NCCL communicator was aborted on rank 1.",
    ):
        with pytest.raises(UserError, match=said) as caught, peers_alive(2):
            raise RuntimeError(text)
        assert "third_party" not in str(caught.value)
        with pytest.raises(RuntimeError), peers_alive(1):
            raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="shape"), peers_alive(2):
        raise RuntimeError("shape mismatch")


WORKER = """
import time
from deltanet_recipes.training import peers
peers.POLL = 0.05
peers.end_with_launcher()
print(".", flush=True)
time.sleep(300)
"""
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=1, stderr=1).wait()
"""


def test_processes_whose_launcher_is_killed_end_with_one_line() -> None:
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCHELASTIC_RUN_ID": "none"}
    command = [sys.executable, "-c", LAUNCHER, WORKER]
    with subprocess.Popen(command, env=paths, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == ".\n"
        launcher.kill()
        (line,) = launcher.stdout.read().splitlines()  # returns once the worker has closed it
    assert line.startswith("error: the launcher of this run has ended; run the same command again")


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
