"""Keeping all that a model remembers of a text: in memory, to go back to it, or in a file, for another process.

`Snapshot(cache)` and `snapshot.rewind()`; `save_session` and `load_session`. Both work for softmax models too.
"""

from deltanet_hf.sessions.session_file import Session, load_session, save_session
from deltanet_hf.sessions.snapshot import Snapshot

__all__ = ["Session", "Snapshot", "load_session", "save_session"]
