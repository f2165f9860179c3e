"""The end of a run of several processes in which one of them has ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from deltanet_hf.errors import UserError, one_line

# Gloo's errors are RuntimeErrors that name its source files.
SIGNS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "TCPStore")


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


def _reason(error: RuntimeError) -> str:
    """The first sentence of an error, without the places in the source that it names."""
    return re.sub(r"\s*\[[^]]*[./][^]]*\](:\d+)?:?\s*", " ", one_line(error)).partition(". ")[0][:100].strip()
