"""Sets how PyTorch's CPU threads wait and how many there are; called before torch is imported, which reads it then.

OpenMP's threads spin while they wait for each other. Where another process has one of the CPUs, a thread then spins for
as long as the other one is not scheduled: decoding took four times as long on two CPUs that others used too. Waking
a thread that sleeps costs some 50 microseconds, which is as long as the small operations of a decoding step take. So
threads spin for a few microseconds before they sleep.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

SPINS = "1000"  # of GNU's OpenMP, which PyTorch's wheels bring; others know the policy alone and sleep at once
CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def settle_threads() -> None:
    """Lets threads soon sleep while they wait, and starts no more of them than a container's quota has CPUs.

    Environment variables that the user has set stay as they are. OpenMP itself counts only the CPUs on which the
    process may run (its affinity), but knows no quotas.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    quota = cpu_quota()
    if quota is not None and quota < available_cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, math.ceil(quota))))


def cpu_quota() -> float | None:
    """The CPUs that the process may use by its control groups (those of Linux, version 2 or 1); None for no limit."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [_quota(folder / "cpu.max") for folder in _upwards(CGROUPS, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_of_version_1(folder) for folder in _upwards(CGROUPS / "cpu", path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a control group and of all groups that contain it; of those only that a container can see."""
    inner = root / path.strip("/")
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]


def _quota(file: Path) -> float | None:
    try:
        limit, period = file.read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or of a form that this program does not know
        return None


def _quota_of_version_1(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return limit / int((folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def available_cpus() -> int:
    """The number of CPUs on which the process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
