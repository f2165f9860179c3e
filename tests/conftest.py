"""Settings that every test relies on."""

import functools
import gc
import os
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported, here and in started processes

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
    """A generator that the garbage collector closes within a compiled call ends that call with an error of Dynamo."""
    gc.collect()
    return _compile(*args, **kwargs)


torch.compile = _compile_without_garbage
