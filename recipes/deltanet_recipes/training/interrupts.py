"""Ctrl-C while a run trains: the training loop ends after the step at work, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = b"\nCtrl-C: the run ends after this step, with a checkpoint; Ctrl-C again ends it at once\n"


class Interrupts:
    """Whether the user has pressed Ctrl-C. `requested` changes only inside of `delayed`.

    Args:
        processes: of the run. Several would not end at the same step, so that SIGINT ends them as it does elsewhere.
    """

    def __init__(self, processes: int) -> None:
        self.processes, self.requested = processes, False

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Take the first SIGINT as a request; a second one raises KeyboardInterrupt, as every one does outside.

        Python delivers signals to the main thread only; in another one, this does nothing.
        """
        if self.processes > 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, NOTICE)  # print could be in the middle of another line of the same stream
