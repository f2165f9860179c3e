"""Bounds on what an implementation takes until its first results, because autotuning can compile for minutes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import torch

CANDIDATE_MS = 20  # Triton's default is 100, and one operator has up to 300 candidates


class OverTime(BaseException):
    """The limit of `time_limit` is over; no Exception, which the interrupted code could catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OverTime` after so many seconds, in the main thread, which also computes the backward passes meanwhile.

    The call of a compiler or a kernel that is under way then ends first.
    """

    def stop(*_: Any) -> None:
        raise OverTime(f"no first results within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Have Triton's autotuner compile its candidates on all cores before it times them, each for `CANDIDATE_MS`."""
    from triton.runtime.autotuner import Autotuner

    prune_configs = Autotuner.prune_configs  # called once whenever a kernel is tuned

    def prune_and_compile(tuner: Any, meta: dict[str, Any]) -> list[Any]:
        configs = prune_configs(tuner, meta)
        tuner.do_bench = _timed_briefly
        copy_context().run(_compile, tuner, configs, meta)  # Triton leaves its mode on where waiting is interrupted
        return configs

    Autotuner.prune_configs = prune_and_compile
    try:
        yield
    finally:
        Autotuner.prune_configs = prune_configs


def _timed_briefly(call: Callable[[], object], quantiles: tuple[float, ...]) -> Any:
    from triton.testing import do_bench

    return do_bench(call, warmup=5, rep=CANDIDATE_MS, quantiles=quantiles)


def _compile(tuner: Any, configs: list[Any], meta: dict[str, Any]) -> None:
    from triton import AsyncCompileMode

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        with AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                tuner.fn.run(*tuner.nargs.values(), **{**meta, **config.all_kwargs(), "warmup": True})
    except Exception:
        pass  # the tuner meets the error again and knows what to make of it
    finally:
        pool.shutdown(cancel_futures=True)
