"""The end of a run of several processes in which one of them, or their launcher, has ended."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from deltanet_hf.errors import UserError, one_line

# Gloo's errors are RuntimeErrors that name its source files.
SIGNS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "TCPStore")
POLL = 1.0  # seconds between two looks at the launcher


@contextmanager
def peers_alive(world: int) -> Iterator[None]:
    """Turns an error that says another of the `world` processes cannot be reached into a UserError."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or any(sign in str(error) for sign in SIGNS)
        if world == 1 or not lost:
            raise
        raise UserError(
            f"another process of this run has ended, or cannot be reached ({_reason(error)}); its own message says "
            "why, unless it was killed; run the same command again: it continues after the last checkpoint"
        ) from error


def end_with_launcher() -> None:
    """Ends this process once torchrun or `accelerate launch`, which started it, has ended.

    A launcher ends its processes itself, unless it is killed: they would train on and keep the output locked. Processes
    that a shell started go on without it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL)
        text = "the launcher of this run has ended; run the same command again: it continues after the last checkpoint"
        print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(2)  # the main thread may wait for other processes, which cannot be interrupted

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _reason(error: RuntimeError) -> str:
    """The first sentence of an error, without the places in the source that it names."""
    return re.sub(r"\s*\[[^]]*[./][^]]*\](:\d+)?:?\s*", " ", one_line(error)).partition(". ")[0][:100].strip()
