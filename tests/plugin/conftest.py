"""Fixtures that the tests of the plugin share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deltanet_hf.decoding.capture import CAPTURES
from support.float64 import Float64
from support.replayed_step import EmulatedCapture


@pytest.fixture
def float64() -> Iterator[None]:
    """Everything in float64, so that the tolerances are those of rounding."""
    with Float64():
        yield


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCapture]:
    """Stands for CUDA graphs on a CPU."""
    made, threads = EmulatedCapture(), torch.get_num_threads()
    monkeypatch.setitem(CAPTURES, "cpu", made)
    torch.set_num_threads(1)  # such small operations wait for each other's threads longer than they compute
    yield made
    torch.set_num_threads(threads)
