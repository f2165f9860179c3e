"""Settings that every test relies on."""

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here and in started processes

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The Triton kernels are tested in Triton's interpreter where there is no GPU; that is chosen when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Processes that run side by side share the cores; with two threads each they mostly wait for one another.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))

_compile = torch.compile


@functools.wraps(_compile)
def _compile_without_garbage(*args: Any, **kwargs: Any) -> Any:
    """Dynamo ends with an error if the garbage collector closes a generator within a compiled call."""
    gc.collect()
    gc.disable()
    return _compile(*args, **kwargs)


torch.compile = _compile_without_garbage


@pytest.fixture(autouse=True)
def _collect_garbage_again() -> Iterator[None]:
    yield
    gc.enable()
