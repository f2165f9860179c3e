"""Print a hash of the machine code of every kernel in its pinned configurations, without a GPU.

    PYTHONPATH=.:kernels python tools/kernel_machine_code.py [--only NAME] > after.txt
    diff <(cut -d' ' -f1-3 before.txt) <(cut -d' ' -f1-3 after.txt)

The operators run on CPU tensors with a launch function that compiles each kernel for sm_90 instead of running it.
A line holds the hash, the call, the number of the launch within the call and the kernel's name. The hash covers the
code and the constants in the cubin, and the shared memory and registers per program; it does not cover names,
line numbers and file names. Two trees with equal first three columns run the same machine code.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import pkgutil
import struct
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

import deltanet_kernels
from kernel_calls import CALLS

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


def sections(cubin: bytes) -> list[tuple[str, bytes, int]]:
    """Name, content and info field of every section of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + n * size) for n in range(count)]
    start = headers[names][4]
    found = []
    for name, kind, _, _, at, length, _, info, _, _ in headers:
        end = cubin.index(b"\0", start + name)
        content = b"" if kind == 8 else cubin[at : at + length]
        found.append((cubin[start + name : end].decode(), content, info))
    return found


def code_hash(compiled: Any) -> str:
    """Hash of what decides how the kernel runs: code, constants, registers, shared memory."""
    digest = hashlib.sha256(str(compiled.metadata.shared).encode())
    for name, content, info in sections(compiled.asm["cubin"]):
        if name.startswith((".text", ".nv.constant")):
            digest.update(f"{name.split('.')[1]} {info >> 24}".encode() + content)
    return digest.hexdigest()[:16]


class Recorder:
    """Stands in for `launch`: compiles each new kernel and argument combination once, and prints its hash."""

    def __init__(self) -> None:
        self.call = ""
        self.count = 0
        self.known: dict[str, str] = {}

    def __call__(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        if isinstance(programs, tuple):
            programs = programs[0]
        binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        bound, specialization, _ = binder(*args, **options)
        parsed, signature, constants, attributes = kernel._pack_args(
            BACKEND, options, bound, specialization, None
        )  # fmt: skip
        key = str((id(kernel), signature, constants, attributes, parsed))
        if key not in self.known:
            source = ASTSource
            if kernel.is_gluon():
                from triton.experimental.gluon._runtime import GluonASTSource as source
            compiled = compile(source(kernel, signature, constants, attributes), target=TARGET, options=parsed.__dict__)
            self.known[key] = code_hash(compiled)
        print(self.known[key], self.call, self.count, kernel.__name__, flush=True)
        self.count += 1


def install(recorder: Recorder) -> None:
    """Put the recorder, and an H200's capability and size, in place of the package's own functions."""
    values = {"launch": recorder, "capability": lambda _: (9, 0), "multiprocessors": lambda _: 132}
    for module in pkgutil.walk_packages(deltanet_kernels.__path__, "deltanet_kernels."):
        importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("deltanet_kernels"):
            for attribute, value in values.items():
                if callable(getattr(module, attribute, None)):
                    setattr(module, attribute, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="compile only the calls whose name contains this text")
    only = parser.parse_args().only
    recorder = Recorder()
    install(recorder)
    for name, call in CALLS:
        if only in name:
            recorder.call, recorder.count = name, 0
            call()


if __name__ == "__main__":
    main()
