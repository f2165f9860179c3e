"""Disks that are full, read-only, slow or lost: any library's write ends in one line and leaves no half files."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.file_lock import locked
from deltanet_hf.publish import Workspace, publish_folder
from deltanet_hf.safe_write import replacing, reserve, sync_folder, write_atomically, writing
from support.file_limit import largest_file

VALUES = torch.arange(20_000, dtype=torch.float32)


def _raw(path: Path) -> None:
    with path.open("wb") as file:
        VALUES.numpy().tofile(file)


def _saved(path: Path) -> None:
    with path.open("wb") as file:
        torch.save(VALUES, file)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: path.write_bytes(bytes(80_000)),
    "torch": _saved,
    "safetensors": lambda path: save_file({"w": VALUES}, path),
    "tofile": _raw,
    "np.save": lambda path: np.save(path.with_suffix(".npy"), VALUES.numpy()),
    "memmap": lambda path: np.memmap(path, np.float32, "w+", shape=(20_000,)),
    "tokenizers": lambda path: Tokenizer(WordLevel({f"token {n}": n for n in range(2000)}, "")).save(str(path)),
    "matplotlib": lambda path: Figure(figsize=(9, 9)).savefig(path.with_suffix(".png"), dpi=300),
    "reserve": lambda path: reserve(path, 80_000),
    "write_atomically": lambda path: write_atomically(path, bytes(80_000)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_whoever_writes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with largest_file(4096), pytest.raises(UserError, match=r"^/[^\n]*file: the disk is full[^\n]*$"), writing(path):
        WRITERS[name](path)


REFUSALS: list[tuple[int, str]] = [
    (errno.ENOSPC, "disk is full"),
    (errno.EDQUOT, "disk is full"),
    (errno.EROFS, "cannot be written"),
    (errno.EACCES, "cannot be written"),
    (errno.EIO, "does not answer"),
    (errno.ESTALE, "does not answer"),
    (errno.ETIMEDOUT, "does not answer"),
]


def test_every_refusal_of_a_disk_is_one_line(tmp_path: Path) -> None:
    for number, said in REFUSALS:
        for error in (OSError(number, "x"), Exception(f"I/O error: x (os error {number})")):
            with pytest.raises(UserError, match=rf"^[^\n]*{said}[^\n]*$"), writing(tmp_path):
                raise error


def test_other_errors_pass(tmp_path: Path) -> None:
    errors = UserError("x"), QualityError("x"), RuntimeError("shape"), ValueError("x"), OSError("x")
    for error in (*errors, Exception("(os error 2)")):
        with pytest.raises(type(error)) as caught, writing(tmp_path):
            raise error
        assert caught.value is error


def _write_file(path: Path, fails: bool = False) -> None:
    path.write_text("new")
    if fails:
        raise ZeroDivisionError


def _write_folder(path: Path, fails: bool = False) -> None:
    path.mkdir()
    _write_file(path / "b", fails)


def test_what_is_replaced_is_old_or_new(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("old")
    folder.mkdir()
    (folder / "a").write_text("old")
    (tmp_path / "file.partial").mkdir()  # what killed processes left
    (tmp_path / "folder.partial").write_text("x")
    for write in (_write_file, _write_folder):
        with pytest.raises(ZeroDivisionError), replacing(file if write is _write_file else folder) as partial:
            write(partial, fails=True)
    assert (file.read_text(), (folder / "a").read_text()) == ("old", "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    with replacing(file) as partial:
        _write_file(partial)
    with replacing(folder) as partial:
        _write_folder(partial)
    assert file.read_text() == "new"
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_file_systems_that_cannot_flush_folders_or_reserve_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        reserve(tmp_path / "file", 5000)
        patch.setattr(os, "fsync", refuse)
        sync_folder(tmp_path)
    assert (tmp_path / "file").stat().st_size == 5000
    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(UserError, match=r"its file system has no locks .*local disk"),
        locked(tmp_path / "lock", tmp_path / "out", "conversion"),
    ):
        pytest.fail("the lock was not taken")


def test_an_output_that_nobody_may_write_is_one_line() -> None:
    """/sys takes no files, also not from root."""
    for path in (Path("/sys/nothing/lock"), Path("/sys/lock")):
        with (
            pytest.raises(UserError, match=r"^/sys[^\n]* cannot be written [^\n]*$"),
            locked(path, path.parent, "report"),
        ):
            pytest.fail("the lock was not taken")


def test_a_lock_leaves_nothing_and_keeps_what_it_did_not_make(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "b" / "lock", tmp_path / "a" / "b", "report"):
        assert (tmp_path / "a" / "b" / "lock").exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "lock", tmp_path / "a", "report"):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]


def test_a_lock_that_its_holder_removes_at_this_moment_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a third process would make the file again and lock that, while this one holds a file without a name."""
    lock, real, calls = tmp_path / "lock", fcntl.flock, [0]

    def flock(descriptor: int, how: int) -> None:
        calls[0] += 1
        if calls[0] == 1:
            lock.unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        locked(lock, tmp_path / "out", "report"),
        pytest.raises(UserError, match=r"another report to .*out is running"),
        locked(lock, tmp_path / "out", "report"),
    ):
        pytest.fail("two hold the lock")
    assert calls == [3]


@pytest.mark.parametrize("slow", [0.0, 0.002], ids=["fast", "slow folder"])
def test_many_writers_of_one_output_take_turns(slow: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer removes its hidden folder while others are about to lock it; each result is complete."""
    for name in ("fsync", "replace", "mkdir", "rmdir", "unlink"):
        real = getattr(os, name)

        def delayed(*args: Any, _real: Callable[..., Any] = real, **options: Any) -> Any:
            time.sleep(slow)
            return _real(*args, **options)

        if slow:
            monkeypatch.setattr(os, name, delayed)
    out, inside, ends, problems = tmp_path / "out", [0], {"written": 0, "refused": 0}, []

    def fill(workspace: Workspace) -> dict[str, Any]:
        inside[0] += 1
        alone = inside[0] == 1
        (workspace.model / "config.json").write_text("{}")
        time.sleep(0.0005)
        if not alone or inside[0] != 1:
            problems.append("two writers at once")
        inside[0] -= 1
        return {}

    def write() -> None:
        for _ in range(5 if slow else 30):
            try:
                publish_folder(out, {}, fill, resume=False, overwrite=True)
                ends["written"] += 1
            except UserError as error:
                ends["refused"] += 1
                if "another conversion to" not in str(error):
                    problems.append(str(error))
            except BaseException as error:
                problems.append(repr(error))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert problems == []
    assert ends["written"] > 1
    assert ends["refused"] > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["config.json"]


@pytest.mark.parametrize("step", ["mkdir", "open"])
def test_the_folder_of_a_lock_disappears_while_it_is_made(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is removed by another process right before a system call, and made again by a third one after it."""
    holder = Path if step == "mkdir" else os  # pathlib of Python 3.10 does not see another os.mkdir
    folder, real, calls = tmp_path / "folder", getattr(holder, step), [0]

    def removed_before(path: Any, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 1:
            return real(path, *args, **options)
        raise (FileExistsError if step == "mkdir" else FileNotFoundError)(errno.EIO, "removed", str(path))

    if step == "open":
        folder.mkdir()
    monkeypatch.setattr(holder, step, removed_before)
    with locked(folder / "lock", tmp_path / "out", "conversion"):
        assert (folder / "lock").exists()
    assert calls[0] > 1


def test_a_file_in_the_place_of_the_folder_of_a_lock(tmp_path: Path) -> None:
    """The attempts to make the folder end."""
    (tmp_path / "folder").write_text("a file")
    with (
        pytest.raises(UserError, match=r"out: cannot be written \(File exists\); choose another"),
        locked(tmp_path / "folder" / "lock", tmp_path / "out", "conversion"),
    ):
        pass


def test_a_file_system_that_refuses_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of other systems refuse a colon or a question mark, by an error that says no more."""

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"out: cannot be made \(Invalid argument\); choose another output"):
        publish_folder(tmp_path / "out", {}, lambda _: {}, resume=False, overwrite=False)
    assert list(tmp_path.iterdir()) == []
