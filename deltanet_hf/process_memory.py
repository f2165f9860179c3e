"""The memory of a process on a CPU beside its tensors: its size, and functions that keep it small."""

from __future__ import annotations

import ctypes
import sys

import torch

CPU = torch.device("cpu")
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
    if device.type == "cpu" and sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
