"""Start rules of several layers at once, in threads: they take turns at torch's global random generator.

A rule draws from that generator, and its result may not depend on the rules that run beside it. So one rule runs at a
time, each from the seed of its layer, except where a rule says that it draws nothing: there the others may run too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_turn = threading.Lock()  # one for the process, as there is one generator
_thread = threading.local()  # `has_turn`: whether the thread holds the lock; `ended`: see `follow`


class Stopped(Exception):
    """The conversion ended while this thread still fitted one of its layers."""


@contextmanager
def own_turn(seed: int, device: torch.device) -> Iterator[None]:
    """Runs a rule from a seed; afterwards the global generator is as it was, unless others run in other threads.

    Args:
        seed: seed of the layer's random numbers.
        device: the device on which the rule creates tensors.
    """
    stop_if_ended()
    on_gpu = [device] if device.type == "cuda" else []
    with _turn, torch.random.fork_rng(devices=on_gpu), device:
        torch.manual_seed(seed)
        _thread.has_turn = True
        try:
            yield
        finally:
            _thread.has_turn = False


@contextmanager
def others_may_run() -> Iterator[None]:
    """Lets the rules of other layers run beside the block, which draws no random numbers.

    The rule's own sequence of random numbers goes on behind the block. Outside `own_turn`, nothing happens.
    """
    if not getattr(_thread, "has_turn", False):
        yield
        return
    state = torch.get_rng_state()
    _thread.has_turn = False
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()
        _thread.has_turn = True
        torch.set_rng_state(state)


def follow(ended: threading.Event) -> None:
    """Makes `stop_if_ended` raise in this thread once the event is set."""
    _thread.ended = ended


def stop_if_ended() -> None:
    """Raises `Stopped` if the conversion for which this thread fits layers has ended."""
    ended = getattr(_thread, "ended", None)
    if ended is not None and ended.is_set():
        raise Stopped
