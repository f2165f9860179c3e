"""`deltanet-hf convert OWNER/NAME`: from a hub, at a revision, with what the hub says about licence and owner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from deltanet_convert.start import START
from deltanet_hf.errors import UserError
from deltanet_hf.hub import SINGLE_FILE
from deltanet_hf.publish import Workspace
from support.command_line import CommandLine
from support.local_hub import LocalHub, environment, local_hub
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion

REPO = "someone/teacher"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    with local_hub(monkeypatch, tmp_path / "cache") as running:
        yield running


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = teacher_folder(tmp_path_factory.mktemp("teacher"), "llama", num_hidden_layers=1)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / "LICENSE").write_text("terms")
    return folder


def test_the_result_names_owner_commit_and_licence(hub: LocalHub, teacher: Path, tmp_path: Path) -> None:
    commit = hub.add(REPO, teacher).refs["main"]
    out = tmp_path / "out"
    report = tiny_conversion(REPO, out)
    assert (report["teacher"]["name"], report["teacher"]["revision"]) == (REPO, commit)
    card = ModelCard.load(out / "README.md")
    assert (card.data.base_model, card.data.license) == (REPO, "apache-2.0")
    assert "`someone/teacher`, whose licence, `apache-2.0`, applies" in card.text
    assert (out / "LICENSE").read_text() == "terms"
    assert not (out / "LICENSE").is_symlink()


def test_an_interrupted_conversion_keeps_its_commit(
    hub: LocalHub, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.add(REPO, teacher)
    first = repository.refs["main"]
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "publish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tiny_conversion(REPO, tmp_path / "out")
    second = repository.commit({**hub.files(REPO), "NOTICE": b"new"})
    with pytest.raises(UserError, match=rf"another teacher\.revision \('{first}', now '{second}'\)"):
        tiny_conversion(REPO, tmp_path / "out", resume=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the first commit is in the cache
    report = tiny_conversion(REPO, tmp_path / "out", resume=True, revision=first)
    assert report["teacher"]["revision"] == first


@pytest.mark.slow
def test_a_new_process_with_the_address_of_the_hub(hub: LocalHub, teacher: Path, tmp_path: Path) -> None:
    hub.add(REPO, teacher).breaks = {SINGLE_FILE: 100}
    command = [
        sys.executable,
        "-m",
        "deltanet_recipes.cli",
        "convert",
        REPO,
        str(tmp_path / "out"),
        "--pure",
        "--dry-run",
    ]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    variables = {**os.environ, **environment(hub, tmp_path / "other"), **paths}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert "run the same command again" in run.stderr.strip().splitlines()[-1]
    hub.repositories[REPO].breaks = {}
    again = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "select", "export", "generate"])
def test_every_command_ends_with_one_line(
    cli: CommandLine, hub: LocalHub, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    hub.add(REPO, teacher).refused = (403, "GatedRepo", "you are not in the authorized list")
    options = {"convert": [tmp_path / "out"], "generate": ["--prompt", "x"]}.get(command, [])
    monkeypatch.chdir(tmp_path)
    assert cli(command, REPO, *options) == 2
    errors = [line for line in cli.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "accept its terms at" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("command", ["convert", "select", "export"])
def test_revision_on_the_command_line(
    cli: CommandLine, hub: LocalHub, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    repository = hub.add(REPO, teacher)
    repository.commit({**hub.files(REPO), SINGLE_FILE: b"", "config.json": b"{}"}, "v2")
    options = {"convert": [tmp_path / "out"], "export": ["--check"]}.get(command, [])
    monkeypatch.chdir(tmp_path)
    assert cli(command, REPO, "--revision", "v3", *options) == 2
    assert "not this revision" in cli.err
    assert cli(command, REPO, "--revision", "v2", *options) == 2
    assert repository.refs["v2"] in cli.err  # the message names a file of that commit
    assert cli(command, teacher, "--revision", "main", *options) == 2
    assert "only hub ids have revisions" in cli.err
