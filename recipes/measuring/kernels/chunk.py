"""Times the chunked gated delta rule beside other implementations.

    python -m measuring.kernels chunk --peers

Peers: flash-linear-attention, FlashQLA (K = V = 128 only), FlashInfer (K = V = 128, forward only, on inputs prepared
outside the timing) and causal softmax attention (SDPA) of the same sizes, which computes something else. `norm` says
whether q and k are normalised in the timed call. Every other configuration is first compared with the chunked PyTorch
form in float64, output and gradients, on the first key head of the first row.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid

from deltanet_kernels import torch_chunk_gated_delta_rule
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from measuring.kernels import flashinfer_prefill
from measuring.kernels.harness import Benchmark, Operator, check_and_time, in_float64
from measuring.rows import Row

DEVICE = "cuda"
MIX = "flash_qla"
"""Log decays like those of FlashQLA's published times (benchmark/bench_gated_delta_rule.py of its repository, which
draws the heads without decay at random)."""


class Shape(NamedTuple):
    """Rows, tokens, query and key heads, value heads, head size; the strongest log decay, None for `MIX`."""

    B: int
    T: int
    H: int
    HV: int
    D: int
    g: float | None = -1.0

    def labels(self) -> dict[str, Any]:
        """The shape in a row of the result file; without the key `gates` log decays are in (-1, 0)."""
        gates = {-1.0: {}, None: {"gates": MIX}}.get(self.g, {"gates": [self.g, 0.0]})
        return {"shape": list(self[:5]), **gates}

    @classmethod
    def of(cls, labels: Row) -> Shape:
        """The shape that has these labels."""
        gates = labels.get("gates", [-1.0])
        return cls(*labels["shape"], *([None] if gates == MIX else gates[:1]))


SHAPES = [
    Shape(16, 2048, 9, 9, 64),
    Shape(8, 2048, 32, 32, 64),
    Shape(4, 4096, 32, 32, 128),
    Shape(1, 4096, 32, 32, 128),
    Shape(1, 32768, 32, 32, 128),
    Shape(1, 131072, 16, 16, 128),
    Shape(4, 4096, 16, 32, 128),
    Shape(4, 4096, 8, 32, 128),
    Shape(8, 2048, 32, 32, 128),
    Shape(4, 4096, 32, 32, 64),
    # Long sequences whose heads decay too slowly to forget anything within a segment (segments.py).
    Shape(1, 32768, 32, 32, 128, -0.01),
    Shape(1, 131072, 16, 16, 128, -0.01),
    # The shape at which FlashInfer's forward pass is published.
    Shape(4, 8192, 16, 32, 128),
    Shape(4, 8192, 16, 32, 128, None),
    Shape(1, 32768, 32, 32, 128, None),
    Shape(4, 4096, 32, 32, 128, None),
]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    if q.shape[2] != v.shape[2]:  # softmax attention has query heads over fewer key and value heads, not the reverse
        raise NotImplementedError("more value heads than query heads")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return chunk_gated_delta_rule_triton(RuleCall(q, k, v, g, beta, use_qk_l2norm_in_kernel=True))[0]


def operator(impl: str) -> Operator:
    """The implementation of this name. Raises ImportError if its package is not installed."""
    if impl == "deltanet":
        return ours
    if impl == "sdpa":
        return sdpa
    if impl == "flashinfer":
        return functools.partial(flashinfer_prefill.forward, flashinfer_prefill.rule())
    package = importlib.import_module({"fla": "fla.ops.gated_delta_rule", "flash_qla": "flash_qla"}[impl])
    rule = package.chunk_gated_delta_rule
    return lambda q, k, v, g, beta: rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def make(shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v in bfloat16, log decay in (g, 0) or `MIX`, beta in (0, 1), and a gradient of o."""
    torch.manual_seed(0)
    B, T, H, HV, D, strongest = shape
    q, k, v, do = (torch.randn(B, T, n, D, device=DEVICE, dtype=torch.bfloat16) for n in (H, H, HV, HV))
    if strongest is None:
        g = logsigmoid(torch.randn(B, T, HV, device=DEVICE)) / 16
        g[..., ::4] = 0.0
    else:
        g = strongest * torch.rand(B, T, HV, device=DEVICE)
    return [x.requires_grad_() for x in (q, k, v, g, torch.rand(B, T, HV, device=DEVICE))], do


@functools.lru_cache(maxsize=1)
def reference(shape: Shape) -> list[torch.Tensor]:
    """o and the gradients of q, k, v, g, beta of the first row and key head of `make(shape)`, in float64."""
    leaves, do = make(shape)
    heads = shape.HV // shape.H

    def rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    return in_float64(rule, leaves, do, (1, 1, heads, heads, heads))


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    impl, shape = labels["impl"], Shape.of(labels)
    run = operator(impl)
    leaves, do = make(shape)
    if impl == "sdpa":
        return check_and_time(lambda: run(*leaves), leaves[:3], do, None, options)
    if impl == "flashinfer":
        given = flashinfer_prefill.prepare(leaves)
        return {"norm": "outside"} | check_and_time(lambda: run(*given), [], do, reference(shape), options)
    return {"norm": "inside"} | check_and_time(lambda: run(*leaves), leaves, do, reference(shape), options)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows: at each shape every implementation; softmax has no gates."""
    for shape in SHAPES:
        for impl in ("deltanet", "fla", "flash_qla", "flashinfer", "sdpa") if peers else ("deltanet",):
            if impl != "sdpa" or shape.g == -1.0:
                yield {**shape.labels(), "impl": impl}


BENCHMARK = Benchmark(
    rows,
    measure,
    {
        "shape": "B, T, H (q, k), HV (v), K = V; log decays in (-1, 0) or in `gates`",
        "gates": f"{MIX}: logsigmoid(N(0, 1)) / 16, no decay in every fourth head",
        "norm": "whether q and k are normalised inside the timed call",
    },
)
