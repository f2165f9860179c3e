"""Times the first calls, which compile the kernels: `python -m measuring.kernels first_call`.

The calls are those of one Gated DeltaNet layer in bfloat16: forward and backward of the convolution, the chunked gated
delta rule and the gated norm, and a decoding step. Each run is a new process, first with an empty cache of compiled
kernels, then with the cache that the first run filled. Starting the process and creating the inputs are not counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from deltanet_kernels import causal_conv1d, chunk_gated_delta_rule, gated_delta_step_, gated_rms_norm
from measuring.kernels.harness import Benchmark
from measuring.rows import Row


def _done() -> float:
    torch.cuda.synchronize()
    return time.monotonic()


def seconds(size: int) -> dict[str, float]:
    """Seconds per operator with two heads of this size, from its call to the end of its work on the device."""
    torch.manual_seed(0)
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(1, 256, 6 * size, **bf16).requires_grad_()
    weight = torch.randn(6 * size, 4, **bf16).requires_grad_()
    g, beta = (torch.rand(1, 256, 2, device="cuda").requires_grad_() for _ in range(2))
    z = torch.randn(1, 256, 2, size, **bf16).requires_grad_()
    scale = torch.ones(size, **bf16).requires_grad_()
    torch.autograd.grad((x * x).sum(), x)  # starts autograd's thread
    times = [_done()]
    y, _ = causal_conv1d(x, weight, activation="silu")
    torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    times.append(_done())
    q, k, v = (part.detach().unflatten(2, (2, size)).requires_grad_() for part in y.chunk(3, dim=2))
    o, _ = chunk_gated_delta_rule(q, k, v, -g, beta, use_qk_l2norm_in_kernel=True)
    torch.autograd.grad(o, (q, k, v, g, beta), z)
    times.append(_done())
    normed = gated_rms_norm(o.detach().requires_grad_(), z, scale, 1e-6)
    torch.autograd.grad(normed, (z, scale), torch.ones_like(normed))
    times.append(_done())
    with torch.no_grad():
        q, k, v = x[:, :1].chunk(3, dim=2)
        logits = torch.zeros(1, 1, 2, **bf16)
        rates = torch.zeros(2, device="cuda")
        state = torch.zeros(1, 2, size, size, device="cuda")
        tail = torch.zeros(1, 6 * size, 3, **bf16)
        gated_delta_step_(
            q, k, v, logits, logits, state, rates, rates, conv_weight=weight, conv_tail=tail, z=z[:, :1].flatten(2),
            norm_weight=scale, qk_silu=True, v_silu=True,
        )  # fmt: skip
    times.append(_done())
    names = ("convolution_s", "delta_rule_s", "norm_s", "step_s")
    return {name: round(b - a, 3) for name, a, b in zip(names, times, times[1:], strict=False)}


@functools.lru_cache(maxsize=1)
def kernel_cache(size: int) -> tempfile.TemporaryDirectory[str]:
    """The cache of the runs of one size."""
    return tempfile.TemporaryDirectory()


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The seconds of a new process."""
    if labels["cache"] == "empty":
        kernel_cache.cache_clear()
    done = subprocess.run(
        [sys.executable, "-m", "measuring.kernels.first_call", str(labels["K"])],
        env=os.environ | {"TRITON_CACHE_DIR": kernel_cache(labels["K"]).name},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for size in (64, 128):
        for state in ("empty", "filled"):
            yield {"K": size, "V": size, "cache": state}


BENCHMARK = Benchmark(rows, measure, {"dtype": "bfloat16"})

if __name__ == "__main__":  # the new process
    print(json.dumps(seconds(int(sys.argv[1]))))
