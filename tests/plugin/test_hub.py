"""Hub ids: a download that fails gives one line with the remedy, leaves nothing half done, and can be repeated."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from deltanet_hf.errors import UserError
from deltanet_hf.hub import INDEX_FILE, SINGLE_FILE, download_model, model_folder
from support.local_hub import Files, LocalHub, local_hub

REPO = "someone/model"
WEIGHTS = bytes(range(256)) * 200


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with local_hub(monkeypatch, tmp_path / "cache") as running:
        yield running


def one_file() -> Files:
    return {"config.json": b"{}", "LICENSE": b"terms", "README.md": b"card", SINGLE_FILE: WEIGHTS, "x.bin": b"pickle"}


def sharded(**changes: object) -> Files:
    shards = {f"model-0000{i}-of-00002.safetensors": WEIGHTS + bytes([i]) for i in (1, 2)}
    weight_map: dict[str, object] = {f"t{i}": name for i, name in enumerate(shards)}
    index = json.dumps({"weight_map": {**weight_map, **changes}}).encode()
    return {"config.json": b"{}", INDEX_FILE: index, **shards}


def contents(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refused(*parts: str, repo: str = REPO, revision: str | None = None) -> None:
    with pytest.raises(UserError) as caught:
        download_model(repo, revision)
    message = str(caught.value)
    for part in (repo, *parts):
        assert part in message, message
    assert "\n" not in message
    assert len(message) < 500


def unfinished() -> list[Path]:
    return [file for file in Path(constants.HF_HUB_CACHE).rglob("*") if "incomplete" in file.name]


@pytest.mark.parametrize("files", [one_file(), sharded()], ids=["one file", "shards"])
def test_download_has_what_is_needed_and_no_pickles(hub: LocalHub, files: Files) -> None:
    commit = hub.add(REPO, files).refs["main"]
    folder = model_folder(REPO)
    assert folder.name == commit
    assert contents(folder) == {name: data for name, data in files.items() if name != "x.bin"}
    fetched = len(hub.fetched)
    assert download_model(REPO) == folder
    assert len(hub.fetched) == fetched


def test_revisions(hub: LocalHub) -> None:
    repository = hub.add(REPO, one_file())
    new = {**one_file(), SINGLE_FILE: b"later"}
    commit = repository.commit(new, "v2")
    assert (download_model(REPO) / SINGLE_FILE).read_bytes() == WEIGHTS
    assert contents(download_model(REPO, "v2"))[SINGLE_FILE] == b"later"
    assert download_model(REPO, commit) == download_model(REPO, "v2")
    refused("revision 'v3'", "branches, tags or commits", revision="v3")
    refused("revision 'ffffffffffffffffffffffffffffffffffffffff'", revision="f" * 40)


def test_a_local_folder_has_no_revision(hub: LocalHub, tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match=r"--revision: .* leave it out"):
        model_folder(str(tmp_path), "main")


def test_names_that_are_no_hub_ids_are_not_sent(hub: LocalHub) -> None:
    for name in ("a/b/c", "./here", "/nowhere", "a b", "", "a/../b", "x" * 5000, "~nobody/x", "a\0b"):
        with pytest.raises(UserError):
            model_folder(name)
        assert not hub.fetched


def test_a_broken_transfer_is_resumed_where_it_broke(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # received bytes are written in such pieces
    repository = hub.add(REPO, one_file())
    repository.breaks, repository.failures = {SINGLE_FILE: 1000}, 3
    assert contents(download_model(REPO))[SINGLE_FILE] == WEIGHTS
    ranges = [asked for path, asked in hub.fetched if path == SINGLE_FILE]
    assert ranges == [None, "bytes=1000-", "bytes=2000-", "bytes=3000-"]


def test_a_transfer_that_ends_for_good_is_continued_by_the_next_run(hub: LocalHub) -> None:
    repository = hub.add(REPO, sharded())
    second = "model-00002-of-00002.safetensors"
    repository.breaks = {second: 0}
    refused("cannot be downloaded", "run the same command again", "complete files are kept")
    assert not unfinished()
    folder = Path(constants.HF_HUB_CACHE) / "models--someone--model" / "snapshots" / repository.refs["main"]
    assert not (folder / second).exists()
    repository.breaks = {}
    hub.fetched.clear()
    assert contents(download_model(REPO)) == sharded()
    assert hub.fetched == [(second, None)]


def test_a_full_disk(hub: LocalHub) -> None:
    hub.add(REPO, one_file())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(WEIGHTS) // 2, hard))
    try:
        refused("full", constants.HF_HUB_CACHE, "free some space", "HF_HOME", "run the same command again")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not unfinished()
    hub.fetched.clear()
    assert contents(download_model(REPO))[SINGLE_FILE] == WEIGHTS
    assert [path for path, _ in hub.fetched] == [SINGLE_FILE]


def test_errors_of_the_system(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[tuple[Exception, list[str]]] = [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ["full", "HF_HOME"]),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), ["full", "HF_HOME"]),
        (OSError(errno.EROFS, "Read-only file system", "/cache/x"), ["cannot be written", "HF_HOME"]),
        (PermissionError(errno.EACCES, "Permission denied"), ["PermissionError", "network"]),  # of a socket
        (KeyError("sha"), ["KeyError", "HF_ENDPOINT"]),
    ]
    for error, parts in errors:

        def fail(*args: object, error: Exception = error, **kwargs: object) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        refused(*parts)


@pytest.mark.parametrize(
    ("refusal", "parts"),
    [
        (
            (401, "GatedRepo", "Access to model is restricted"),
            ["gated", "accept its terms", "hf auth login", "HF_TOKEN"],
        ),
        ((403, "GatedRepo", "you are not in the authorized list"), ["gated", "accept its terms", "HF_TOKEN"]),
        ((401, "", "Invalid credentials in Authorization header"), ["refuses access", "401", "hf auth login"]),
        ((403, "", "Access is disabled by the owner"), ["refuses access", "403", "disabled by the owner"]),
        ((404, "RepoNotFound", "Repository not found"), ["no such model on the hub", "check the name"]),
    ],
)
def test_models_that_may_not_be_read(hub: LocalHub, refusal: tuple[int, str, str], parts: list[str]) -> None:
    hub.add(REPO, one_file()).refused = refusal
    refused(*parts)
    assert not unfinished()
    hub.repositories[REPO].refused = None  # the terms were accepted
    assert contents(download_model(REPO))[SINGLE_FILE] == WEIGHTS


def test_a_model_that_does_not_exist(hub: LocalHub) -> None:
    refused("no such folder here", "no such model on the hub", "check the name")


@pytest.mark.parametrize("answer", [(503, "busy"), (200, "<html>log in to this network</html>"), (200, "[]")])
def test_something_else_than_the_hub_answers(hub: LocalHub, answer: tuple[int, str]) -> None:
    hub.down = answer
    refused("cannot be downloaded", "HF_ENDPOINT")
    hub.down = None
    hub.add(REPO, one_file())
    assert contents(download_model(REPO))[SINGLE_FILE] == WEIGHTS


def test_nothing_answers(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("cannot be downloaded", "Connection refused", "check the network")


def test_offline(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.add(REPO, sharded())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE is set", constants.HF_HUB_CACHE, "unset it")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    repository.breaks = {"model-00001-of-00002.safetensors": 0}
    refused("run the same command again")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE is set", "does not hold all of its files")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    repository.breaks = {}
    folder = download_model(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetched = len(hub.fetched)
    assert download_model(REPO) == download_model(REPO, "main") == folder
    assert len(hub.fetched) == fetched
    refused("revision 'v2'", "HF_HUB_OFFLINE is set", revision="v2")


def test_a_wrong_index(hub: LocalHub) -> None:
    nowhere = "does not say where the tensors are"
    rows = [(sharded(t0="third.safetensors"), "'third.safetensors', which the repository does not have")]
    for name in ("../x.safetensors", "/etc/x.safetensors", "*.safetensors", "x.bin"):
        rows.append((sharded(t0=name), f"'{name}', which is no .safetensors file beside it"))
    rows += [(sharded(t0=3), nowhere), (sharded(t0=["x"]), nowhere)]
    rows += [({**sharded(), INDEX_FILE: text}, nowhere) for text in (b"{", b"\xff", b"[]", b'{"weight_map": 3}')]
    second = "model-00002-of-00002.safetensors"
    rows += [({name: data for name, data in sharded().items() if name != second}, f"'{second}'")]
    for number, (files, part) in enumerate(rows):
        hub.add(f"someone/{number}", files)
        refused(INDEX_FILE, part, "choose another revision", repo=f"someone/{number}")


def test_no_safetensors(hub: LocalHub) -> None:
    for repo, files in {
        "a/pickled": {"config.json": b"{}", "pytorch_model.bin": b""},
        "a/b": {"config.json": b"{}"},
    }.items():
        hub.add(repo, files)
        hub.fetched.clear()
        refused("pickled weights are refused", "save_pretrained", repo=repo)
        assert [path for path, _ in hub.fetched] == ["config.json"]


def test_a_hub_cannot_write_outside_its_cache(hub: LocalHub, tmp_path: Path) -> None:
    for number, name in enumerate(("../../../../evil.json", "/evil.json", "a/../../../../../evil.json")):
        hub.add(f"someone/{number}", {**one_file(), name: b"evil"})
        refused("cannot be downloaded", repo=f"someone/{number}")
        assert not [file for file in tmp_path.rglob("*") if file.name == "evil.json"]
        assert not Path("/evil.json").exists()
