"""The threads of the commands: they sleep while they wait, and are no more than the process may use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deltanet_recipes import cpu_threads
from deltanet_recipes.cpu_threads import cpu_quota, settle_threads

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders for control groups; four CPUs; none of the variables set."""
    monkeypatch.setattr(cpu_threads, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(cpu_threads, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cpu_threads, "available_cpus", lambda: 4)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restores at the end what settle_threads sets
        monkeypatch.delenv(name)
    return tmp_path


def write(groups: Path, membership: str, files: dict[str, str]) -> None:
    (groups / "membership").write_text(membership)
    for name, content in files.items():
        path = groups / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def settings() -> tuple[str | None, ...]:
    settle_threads()
    return tuple(os.environ.get(name) for name in VARIABLES)


def test_quotas_of_version_2(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[dict[str, str], float | None, str | None]] = [
        ({}, None, None),
        ({"cpu.max": "max 100000\n"}, None, None),
        ({"cpu.max": "150000 100000\n"}, 1.5, "2"),
        ({"cpu.max": "5000 100000\n"}, 0.05, "1"),
        ({"cpu.max": "800000 100000\n"}, 8.0, None),  # more than the four CPUs
        ({"cpu.max": "300000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2.0, "2"),
        ({"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.0, "1"),
        ({"cpu.max": "nothing known"}, None, None),
        ({"cpu.max": "100000 0\n"}, None, None),
    ]
    for files, quota, threads in rows:
        shutil.rmtree(groups / "groups", ignore_errors=True)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        write(groups, "0::/a/b\n", files)
        assert cpu_quota() == quota
        assert settings() == ("PASSIVE", "1000", threads)


def test_quotas_of_version_1(groups: Path) -> None:
    membership = "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n"  # a container sees its own group at the root
    write(groups, membership, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"})
    assert cpu_quota() is None
    write(groups, membership, {"cpu/cpu.cfs_quota_us": "250000"})
    assert cpu_quota() == 2.5
    assert settings() == ("PASSIVE", "1000", "3")


def test_without_control_groups_nothing_is_limited(groups: Path) -> None:
    assert cpu_quota() is None
    assert settings() == ("PASSIVE", "1000", None)


def test_what_the_user_set_stays(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(groups, "0::/\n", {"cpu.max": "100000 100000\n"})
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert settings() == ("ACTIVE", None, "7")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_the_command_line_sets_them_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`deltanet-hf` calls it before any subcommand is loaded, and OpenMP starts as many threads as CPUs are allowed."""
    program = (
        "import json, os, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from deltanet_recipes import cli\n"
        "assert 'torch' not in sys.modules\n"
        "cli.build_app = lambda chosen: lambda: None\n"
        "cli.main()\n"
        "import torch\n"
        "print(json.dumps([os.environ.get('OMP_WAIT_POLICY'), torch.get_num_threads()]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == ["PASSIVE", 1]
