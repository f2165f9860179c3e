"""Shared by the tests of the Gluon kernels: where they run, cases of complete chunks, and compiling without a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.cases import Case
from tests.kernels.triton_mode import GPU

HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
EPS = torch.finfo(torch.bfloat16).eps

WHOLE_CHUNKS = [
    Case("two heads", T=192, B=2, H=2),
    Case("g=0", T=128, g="zero"),
    Case("g=-200", T=128, g="closed"),
    Case("closed at a chunk's last token", T=128, g="last"),
    Case("g=-inf", T=128, g="reset"),
    Case("beta=0", T=128, H=2, beta="zero"),
    Case("beta=2", T=128, beta="two"),
    Case("zero keys", T=128, keys="zero"),
    Case("raw gates", T=192, B=2, H=2, raw=True),
    Case("raw gates, keys as they are", T=128, raw=True, l2norm=False),
]
COMPILE = """
import importlib, json, sys
import deltanet_kernels.gated_delta_rule.chunk
module, name, variants = json.loads(sys.argv[1])
assert module not in sys.modules
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
kernel = getattr(importlib.import_module(module), name)
wide = ("g", "beta", "A_log", "dt_bias", "factors", "bounds", "dg", "dbeta", "gate_sums")
types = {name: "*fp32" for name in wide} | {"scale": "fp32", "T": "i32", "tokens": "i32"}
types |= {f"{name}_{step}": "i32" for name in "qkov" for step in ("row", "head")}
for constants, registers in variants:
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
    odd = ("scale", "T", *constants)
    even = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(signature) if name not in odd}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(n),): x for n, x in constants.items()}, even)
    options = {"num_warps": 4, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print("\\nPTX " + json.dumps({"shared": compiled.metadata.shared, "ptx": compiled.asm["ptx"]}))
"""


@dataclass(frozen=True)
class Compiled:
    """Bytes of shared memory per program, and the PTX."""

    shared: int
    ptx: str


def compile_for_hopper(module: str, kernel: str, variants: list[tuple[dict[str, Any], int]]) -> list[Compiled]:
    """The Gluon kernel for sm_90 with each of these pairs of constants and registers per thread.

    In one new process, where importing the operators has not imported the kernel's module.
    """
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    request = json.dumps([f"deltanet_kernels.{module}", kernel, variants])
    run = subprocess.run([sys.executable, "-c", COMPILE, request], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [Compiled(**json.loads(line[4:])) for line in run.stdout.splitlines() if line.startswith("PTX ")]
