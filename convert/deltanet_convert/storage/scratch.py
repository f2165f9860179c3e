"""A folder for a trial: what is to be saved after hours of work is saved once before it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltanet_hf.safe_write import writing

IF_FULL = "free some space there, or set TMPDIR to another folder"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder for temporary files, removed at the end; UserError if none can be made."""
    with writing(Path(tempfile.gettempdir()), IF_FULL):
        folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
