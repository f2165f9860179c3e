"""Writing files so that a crash leaves either the old state or the new one, with errors that users can act on."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
KEPT = "free some space and run the same command again (convert: with --resume): finished work is kept"
DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}
MISPLACED = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


@contextmanager
def writing(path: Path, if_full: str = KEPT) -> Iterator[None]:
    """Turns an operating system error that says `path` cannot be written into a UserError; others pass through.

    `if_full` is the remedy for a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UserError(
                f"{path}: the disk is full, or a quota or size limit is reached ({error.strerror}); {if_full}"
            ) from error
        if error.errno in DENIED:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); choose an output folder that you may write to"
            ) from error
        if error.errno in MISPLACED:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another output") from error
        raise


def sync_folder(folder: Path) -> None:
    """Flushes renames and new directory entries of `folder` to the disk, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, if_full: str = KEPT) -> None:
    """Writes `data` to `path` completely or not at all: to a temporary name first, then fsync and rename."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path, if_full):
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
