"""Writing files so that a crash leaves either the old state or the new one, with errors that users can act on."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import QualityError, UserError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
KEPT = "free some space and run the same command again (convert: with --resume): finished work is kept"
DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}
MISPLACED = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
LOST = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV}
UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # by some network file systems


@contextmanager
def writing(path: Path, if_full: str = KEPT) -> Iterator[None]:
    """Turns an error that says `path` cannot be written into a UserError; others pass through.

    It may come from the operating system, or from a library that puts what the system said into an error of its own
    (torch, safetensors, tokenizers, NumPy). `if_full` is the remedy for a full disk.
    """
    try:
        yield
    except (UserError, QualityError):
        raise
    except Exception as error:
        number = _system_error(error)
        if number is None:
            raise
        reason = os.strerror(number)
        if number in FULL:
            raise UserError(
                f"{path}: the disk is full, or a quota or size limit is reached ({reason}); {if_full}"
            ) from error
        if number in DENIED:
            raise UserError(
                f"{path}: cannot be written ({reason}); choose an output folder that you may write to"
            ) from error
        if number in LOST:
            raise UserError(
                f"{path}: its disk or network folder does not answer ({reason}); run the same command again when it "
                "does (convert: with --resume): finished work is kept"
            ) from error
        if number in MISPLACED and isinstance(error, OSError):
            raise UserError(f"{path}: cannot be written ({reason}); choose another output") from error
        raise


def _system_error(error: BaseException) -> int | None:
    """The errno behind an exception; None if it has none."""
    if isinstance(error, OSError):
        if error.errno is None and re.search(r"\d+ requested and \d+ written", str(error)):
            return errno.ENOSPC  # NumPy's `tofile` says how much was written, but not why
        return error.errno
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # libraries in Rust
        return int(found[1])
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):  # torch.save
        return error.__context__.errno
    return None


@contextmanager
def replacing(path: Path, if_full: str = KEPT) -> Iterator[Path]:
    """Yields a temporary path beside `path` for a file or a folder, which takes the place of `path` at the end.

    Until then `path` is as before. What a failed block has written is removed, and so is what a killed process left.
    """
    temporary = path.with_name(path.name + ".partial")
    with writing(path, if_full):
        remove(temporary)
        try:
            yield temporary
            for file in temporary.iterdir() if temporary.is_dir() else [temporary]:
                sync_file(file)
            if temporary.is_dir():
                sync_folder(temporary)
                remove(path)
            os.replace(temporary, path)
            sync_folder(path.parent)
        except Exception:
            remove(temporary)
            raise


def remove(path: Path) -> None:
    """Deletes a file or a folder with everything in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def reserve(path: Path, size: int) -> None:
    """Makes `path` a file of `size` bytes that the disk has room for.

    A memory map of a file with holes would end the process by a signal when the disk is full.
    """
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(descriptor, 0, max(1, size))
                except OSError as error:
                    if error.errno not in UNSUPPORTED:
                        raise
            os.truncate(descriptor, size)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flushes a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flushes renames and new directory entries of `folder` to the disk, so that they survive a power cut.

    Some network file systems cannot do that for folders.
    """
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def write_atomically(path: Path, data: bytes, if_full: str = KEPT) -> None:
    """Writes `data` to `path` completely or not at all: to a temporary name first, then fsync and rename."""
    with replacing(path, if_full) as temporary:
        temporary.write_bytes(data)
