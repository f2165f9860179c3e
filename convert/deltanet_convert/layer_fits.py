"""Fits several layers at once in threads, where one layer is too small to keep all cores of a CPU busy.

The teacher's activations on the calibration text depend on the teacher alone. So the main thread can run the teacher's
next layers while earlier ones are being fitted; it takes the results in the order of the layers. Every layer is
computed with the same number of threads, however many are fitted at once, and has its own random numbers
(`start/turns.py`): the weights do not depend on what runs beside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch
from torch import Tensor

from deltanet_hf.process_memory import share_heap

from .layer_step import LayerStep, LayerWork
from .start.turns import follow

Submit = Callable[[LayerWork], "Future[LayerWork]"]


@contextmanager
def fit_threads(step: LayerStep, at_once: int) -> Iterator[Submit]:
    """Yields a function that fits a layer; at the end, fits that nobody waits for are stopped.

    The cores are shared out evenly. With `at_once` = 1, the function fits the layer itself before it returns.
    """
    if at_once == 1:
        yield lambda work: _finished(step.fit, work)
        return
    threads, ended = torch.get_num_threads(), threading.Event()
    each = max(1, threads // at_once)
    begun: list[threading.Thread] = []

    def begin() -> None:
        begun.append(threading.current_thread())
        torch.set_num_threads(each)
        follow(ended)

    share_heap()
    with torch.random.fork_rng(devices=[]):  # restored once all threads have ended
        torch.set_num_threads(each)
        pool = ThreadPoolExecutor(at_once, "fit", begin)
        try:
            yield lambda work: pool.submit(step.fit, work)
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)
            for thread in begun:  # the pool does not know one that was being started when Ctrl-C came
                thread.join()
            torch.set_num_threads(threads)


def fitted_layers(
    step: LayerStep, indices: Iterable[int], calibration: Tensor, submit: Submit, at_once: int
) -> Iterator[LayerWork]:
    """Yields the layers in order, each as soon as it and those before it are fitted.

    Args:
        indices: the layers, in ascending order.
        calibration: the teacher's activations before the first of them; with `at_once` = 1, they change in place.
        submit: what `fit_threads` yields.
        at_once: number of layers that are fitted at the same time.

    Raises:
        Exception: what a layer's fit raised, or the teacher's pass through it, after the layers before it were yielded.
    """
    waiting: deque[Future[LayerWork]] = deque()
    for index in indices:
        try:
            work = step.begin(index, calibration if at_once == 1 else calibration.clone())
        except Exception:
            yield from _results(waiting)
            raise
        calibration = work.calibration
        waiting.append(submit(work) if work.changes else _finished(lambda same: same, work))
        while waiting and (waiting[0].done() or _is_full(waiting, at_once)):
            yield _result(waiting.popleft())
    yield from _results(waiting)


def _is_full(waiting: deque[Future[LayerWork]], at_once: int) -> bool:
    """Whether the next layer has to wait for the first: every thread has one, or too many are in memory.

    Layers that stay as they are, and those that are fitted already, stand in the same line.
    """
    return sum(not work.done() for work in waiting) >= at_once or len(waiting) >= 3 * at_once


def _results(waiting: deque[Future[LayerWork]]) -> Iterator[LayerWork]:
    while waiting:
        yield _result(waiting.popleft())


def _result(work: Future[LayerWork]) -> LayerWork:
    while not work.done():  # a Ctrl-C that arrives just before a wait is not noticed during it
        wait([work], timeout=0.5)
    return work.result()


def _finished(function: Callable[[LayerWork], LayerWork], work: LayerWork) -> Future[LayerWork]:
    future: Future[LayerWork] = Future()
    future.set_result(function(work))
    return future
