"""A lock that one process holds on an output, so that two commands never write the same one."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from .errors import UserError
from .safe_write import writing

HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
ATTEMPTS = 100


@contextmanager
def locked(lock: Path, output: Path, what: str) -> Iterator[None]:
    """Holds the file `lock`, which exists meanwhile, and its folder. A process that is killed holds it no longer.

    Args:
        output: what is written meanwhile, and `what` does it, for messages.

    Raises:
        UserError: another process holds it; it cannot be made; or its file system has no locks.
    """
    made = [folder for folder in lock.parents if not folder.exists()]  # the innermost first
    descriptor = _take(lock, output, what)
    try:
        yield
    finally:
        if _is_still(lock, descriptor):
            lock.unlink()
        os.close(descriptor)
        with suppress(OSError):  # a folder that holds something stays
            for folder in made:
                folder.rmdir()


def locked_beside(output: Path, what: str) -> AbstractContextManager[None]:
    """As `locked`, with a hidden file beside an output that is not a folder, or not one yet."""
    return locked(output.with_name(f".{output.name}.lock"), output, what)


def _take(lock: Path, output: Path, what: str) -> int:
    while True:
        try:
            with writing(output):
                descriptor = _open(lock)
        except OSError as error:
            raise UserError(f"{output}: cannot be made ({error.strerror}); choose another output") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in HELD:
                raise UserError(f"{lock.parent}: another {what} to {output} is running; wait for it") from error
            raise UserError(
                f"{lock}: its file system has no locks ({error.strerror}); choose an output on a local disk, and copy "
                "the result"
            ) from error
        if _is_still(lock, descriptor):
            return descriptor
        os.close(descriptor)  # its holder removed it between the two calls, and another process may hold a new one


def _open(lock: Path) -> int:
    """Opens the file `lock` in a folder that other processes may be making and removing."""
    attempts = 0
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileExistsError, FileNotFoundError):  # the former from `mkdir`, where the folder is gone again
            attempts += 1
            if attempts == ATTEMPTS:
                raise


def _is_still(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False
