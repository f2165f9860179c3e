"""Writing to disk so that a crash leaves the old state or the new one, with errors a user can act on."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals to write `path` into UserErrors."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise UserError(
                f"{path}: the disk is full or a quota or size limit is reached ({error.strerror}); make "
                "room and run the same command with --resume, nothing is lost"
            ) from error
        if error.errno in DENIED:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); choose an output folder that you may write to"
            ) from error
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames and new files inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or nothing: temporary name, fsync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
