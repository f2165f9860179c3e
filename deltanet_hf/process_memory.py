"""The memory of a process on a CPU beside its tensors: its size, and functions that keep it small."""

from __future__ import annotations

import ctypes
import sys

import torch

CPU = torch.device("cpu")
M_ARENA_MAX = -8  # of `mallopt`, in the GNU C library's malloc.h
RUNTIME_BYTES = 500 * 2**20
"""Python, torch, transformers and what they import, resident (torch 2.13, transformers 5.23, Linux; measured)."""
TOKENIZER_BYTES_PER_WORD = 1000
"""Of a fast tokenizer with byte-pair encoding, per word of the vocabulary (measured)."""


def runtime_bytes(vocabulary: int) -> int:
    """Bytes of the libraries, and of a tokenizer of so many words."""
    return RUNTIME_BYTES + TOKENIZER_BYTES_PER_WORD * vocabulary


def give_back_freed_memory(device: torch.device = CPU) -> None:
    """Returns the free pages of the C library's heaps to the operating system, if `device` is a CPU.

    The GNU C library keeps freed blocks of up to 32 MiB for later allocations. Where their sizes differ, as those of
    layers and micro-batches do, what is kept adds up: to half a gigabyte after a layer of 1B parameters' shape.
    With other C libraries, nothing happens.
    """
    if device.type == "cpu":
        _call("malloc_trim", 0)


def share_heap() -> None:
    """Lets threads that begin from now on allocate from the heap that is there, which then serves them all.

    By default each thread has a heap of its own in the GNU C library, and keeps what it has freed.
    """
    _call("mallopt", M_ARENA_MAX, 1)


def _call(name: str, *arguments: int) -> None:
    """Calls a function of the C library, if it has that."""
    if not sys.platform.startswith("linux"):
        return
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)
