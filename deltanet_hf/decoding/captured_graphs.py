"""The graphs of each model: steps by batch size, and prompts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from deltanet_hf.decoding.captured_prefill import CapturedPrefill
from deltanet_hf.decoding.captured_step import CapturedStep
from deltanet_hf.fast import FastDecoder

KEPT = 4  # graphs per model, of as many batch sizes; each holds the states of its batch


@dataclass
class CapturedPrefills:
    """The captured prompts of one form of a model.

    They share memory, so that calls of several threads have to be on one CUDA stream, as they are by default.

    Attributes:
        capturable: whether there can be any.
        kept: by sequences and tokens, the one that was read last at the end.
    """

    form: FastDecoder
    capturable: bool
    kept: dict[tuple[int, int], CapturedPrefill] = field(default_factory=dict)


class CapturedGraphs:
    """The captured steps of one model, by batch size, and its captured prompts (`captured_prefill.py`)."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, CapturedStep] = OrderedDict()
        self.prompts: CapturedPrefills | None = None
        self.report = "separate launches: nothing was decoded, or the model is not a converted one"

    def take(self, batch: int, key: Any, tokens: int, capacity: int) -> CapturedStep | None:
        """The graph for this batch size, if it can serve; it is not kept until `put`.

        Args:
            tokens: that it has to hold.
            capacity: of a new one; one with more than twice as many places would read too many.
        """
        step = self._steps.pop(batch, None)
        if step is None:
            return None
        if step.key != key:
            if step.key[-1] != key[-1]:  # the model has changed
                self.clear()
            return None
        if step.buffers.grows and not tokens <= step.buffers.capacity <= 2 * capacity:
            return None
        return step

    def put(self, step: CapturedStep) -> None:
        """Keep a graph; of those with growing keys and values, only this one."""
        if step.buffers.grows:
            self._steps = OrderedDict((size, kept) for size, kept in self._steps.items() if not kept.buffers.grows)
        self._steps[step.batch] = step
        while len(self._steps) > KEPT:
            self._steps.popitem(last=False)

    def clear(self) -> None:
        self._steps.clear()
        self.prompts = None


_GRAPHS: WeakKeyDictionary[nn.Module, CapturedGraphs] = WeakKeyDictionary()


def captured_graphs_of(model: nn.Module) -> CapturedGraphs:
    """The graphs of a model, which live as long as it does."""
    return _GRAPHS.setdefault(model, CapturedGraphs())


def forget_graphs(model: nn.Module) -> None:
    """Free the graphs and buffers that `generate` keeps with a model for its next call."""
    captured_graphs_of(model).clear()


def decoded_by(model: nn.Module) -> str:
    """How a model's last `generate` decoded: "CUDA graph", or "separate launches" with the reason."""
    return captured_graphs_of(model).report
