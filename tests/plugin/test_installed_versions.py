"""Packages that are too old are refused before they are imported, with one line."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import deltanet_hf.evaluation.tasks
import deltanet_recipes.training
from deltanet_convert.storage.gguf_teacher import GgufTeacher
from deltanet_hf.exit_codes import exit_with
from deltanet_hf.version import REPOSITORY, install_command
from deltanet_kernels import installed_versions
from deltanet_kernels.installed_versions import OLDEST, TooOldError, require

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("deltanet_hf", "kernels/deltanet_kernels", "convert/deltanet_convert", "recipes")
NOT_IN_THE_SUITE = (
    *("l2m4m", "mkdocs-material", "mkdocstrings-python"),
    *("hatchling", "mypy", "pre-commit", "ruff", "trl", "vllm"),
)


def lower_bounds() -> dict[str, str]:
    """The lower bounds of pyproject.toml, by package."""
    return dict(re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Makes the metadata name these versions, and no other package."""

    def version(package: str) -> str | None:
        if package.replace("-", "_") not in versions:
            raise PackageNotFoundError(package)
        return versions[package.replace("-", "_")]

    monkeypatch.setattr(installed_versions, "version", version)


def in_fresh_interpreter(tmp_path: Path, package: str, version: str, *arguments: str) -> subprocess.CompletedProcess:
    """Python with metadata of another version of a package before the installed one."""
    folder = tmp_path / f"{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    paths = [str(tmp_path), *(str(ROOT / part) for part in (".", "kernels", "convert", "recipes"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_bounds_are_those_of_pyproject() -> None:
    bounds = lower_bounds()
    assert {package: bounds[package] for package in OLDEST} == OLDEST


def test_the_oldest_constraints_are_the_lower_bounds() -> None:
    """Of each package that a plain installation or an extra of users brings, and of those that run the suite."""
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    bounds = {name: number for name, number in lower_bounds().items() if name not in NOT_IN_THE_SUITE}
    assert {name: released(number) for name, number in pinned.items()} == {
        name: released(number) for name, number in bounds.items()
    }


def test_the_repository_has_one_address() -> None:
    assert f'Repository = "{REPOSITORY}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nrepo_url: {REPOSITORY}\n" in (ROOT / "mkdocs.yml").read_text()
    assert f"\nurl: {REPOSITORY}\n" in (ROOT / "CITATION.cff").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert set(re.findall(r"https://github\.com/deltanet-hf[\w/-]*", page.read_text())) <= {REPOSITORY}, page
    assert install_command("eval") == f"pip install 'deltanet-hf[eval] @ git+{REPOSITORY}'"


def test_nothing_says_to_install_this_package_from_an_index() -> None:
    """Whoever took the name there would run code on the machines of those who follow."""
    sources = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for file in (*sources, *pages):
        assert not re.search(r"pip install [^\n`]*deltanet[-_]hf", file.read_text(encoding="utf-8")), file


def released(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    numbers = [int(number) for number in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def test_new_enough_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.11", "2.11.0", "2.11.0rc1", "2.11.0+cpu", "2.12.0a0+git12ab", "2.100", "3", "10.0.1", "", None):
        installed(monkeypatch, torch=version)
        require("torch", "triton")  # the latter is not installed


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2.10.9", "2.9.1+cu128", "2", "1.13.1", "0", "2.10.0a0+34c6371.nv26.01"):
        installed(monkeypatch, torch=version)
        with pytest.raises(TooOldError) as refused:
            require("torch")
        assert str(refused.value) == (
            f"deltanet-hf needs torch 2.11 or later, and {version} is installed: "
            "run `pip install --upgrade 'torch>=2.11'`"
        )


@pytest.mark.parametrize(
    ("room", "package", "version"),
    [
        ("deltanet_kernels", "torch", "2.10.0"),
        ("deltanet_kernels", "triton", "3.5.1"),
        ("deltanet_hf", "torch", "2.10.0"),
    ],
)
def test_importing_is_refused(tmp_path: Path, room: str, package: str, version: str) -> None:
    run = in_fresh_interpreter(tmp_path, package, version, "-c", f"import {room}")
    wanted = f"deltanet-hf needs {package} {OLDEST[package]} or later, and {version} is installed: run "
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(f"deltanet_kernels.installed_versions.TooOldError: {wanted}")


def test_the_command_line_says_it_in_one_line(tmp_path: Path) -> None:
    run = in_fresh_interpreter(tmp_path, "torch", "2.10.0", "-m", "deltanet_recipes.cli", "convert", "a", "b")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "error: deltanet-hf needs torch 2.11 or later, and 2.10.0 is installed: run "
        "`pip install --upgrade 'torch>=2.11'`\n"
    )


def test_an_old_transformers_is_refused_before_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, transformers="5.16.1")
    with pytest.raises(TooOldError, match=r"transformers 5\.17 or later, and 5\.16\.1 is installed"):
        importlib.reload(deltanet_hf)


def test_packages_of_extras_are_checked_where_they_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, peft="0.17.1", lm_eval="0.4.12", gguf="0.16.3", torch="2.11.0", transformers="5.17.0")
    importlib.reload(deltanet_hf)  # a plain import needs none of them
    with pytest.raises(TooOldError, match=r"peft 0\.18 or later, and 0\.17\.1 is installed"):
        importlib.reload(deltanet_recipes.training)
    with pytest.raises(TooOldError, match=r"lm-eval 0\.4\.13 or later, and 0\.4\.12 is installed"):
        importlib.reload(deltanet_hf.evaluation.tasks)
    with pytest.raises(TooOldError, match=r"gguf 0\.17 or later, and 0\.16\.3 is installed"):
        GgufTeacher.open(tmp_path / "a.gguf", None)  # type: ignore[arg-type]


def test_an_extra_that_is_too_old_ends_a_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_with(TooOldError("deltanet-hf needs peft 0.18 or later"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: deltanet-hf needs peft 0.18 or later\n"
