"""Times the gated delta rule read at boundaries beside the rule itself on the same inputs.

    python -m measuring.kernels group

Implementations: `deltanet`, chunk_group_gated_delta_rule; `rule`, chunk_gated_delta_rule, which computes another
function. Both are first compared with their PyTorch forms in float64, output and gradients, on the first state head of
the first row.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.gated_delta_rule import cpu, launch_plan
from deltanet_kernels.gated_delta_rule.chips import chunk_config
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from deltanet_kernels.group_rule import chunk
from deltanet_kernels.group_rule.calls import GroupRuleCall
from deltanet_kernels.group_rule.chunk import chunk_group_triton
from deltanet_kernels.group_rule.cpu import chunk_group_torch
from measuring.kernels.harness import Always, Benchmark, Configuration, check_and_time, in_float64
from measuring.rows import Row

DEVICE = "cuda"
Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [
    (4, 8192, 32, 32, 128),
    (4, 8192, 32, 8, 128),
    (16, 4096, 9, 3, 64),
    (4, 8192, 9, 3, 64),
    (2, 4096, 9, 3, 64),
    (1, 8192, 9, 3, 64),
    (1, 32768, 9, 3, 64),
    (1, 8192, 32, 32, 128),
]
"""Rows, tokens, query heads, key and value heads, head size."""
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "deltanet": (GroupRuleCall, chunk_group_triton, chunk_group_torch),
    "rule": (RuleCall, chunk_gated_delta_rule_triton, cpu.chunked),
}
"""Per implementation its call, its Triton form and its PyTorch form."""


def make(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """q, k, v in bfloat16, log decay in (-1, 0), beta in (0, 1), and a gradient of o."""
    torch.manual_seed(0)
    B, T, HQ, HV, D = shape
    q, k, v, do = (torch.randn(B, T, n, D, device=DEVICE, dtype=torch.bfloat16) for n in (HQ, HV, HV, HQ))
    g, beta = -torch.rand(B, T, HV, device=DEVICE), torch.rand(B, T, HV, device=DEVICE)
    return [x.requires_grad_() for x in (q, k, v, g, beta)], do


def run(form: Callable[..., Any], call: Callable[..., Any], leaves: Sequence[Tensor]) -> Tensor:
    o: Tensor = form(call(*leaves, use_qk_l2norm_in_kernel=True))[0]
    return o


@functools.lru_cache(maxsize=1)
def reference(shape: Shape, impl: str) -> list[Tensor]:
    """o and the gradients of q, k, v, g, beta of the first row and state head of `make(shape)`, in float64."""
    call, _, form = FORMS[impl]
    leaves, do = make(shape)
    queries = shape[2] // shape[3]
    return in_float64(lambda *own: run(form, call, own), leaves, do, (queries, 1, 1, 1, 1))


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    shape, impl = tuple(labels["shape"]), labels["impl"]
    call, form, _ = FORMS[impl]
    leaves, do = make(shape)
    return check_and_time(lambda: run(form, call, leaves), leaves, do, reference(shape, impl), options)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows; the rule itself is always there."""
    return ({"shape": list(shape), "impl": impl} for shape in SHAPES for impl in FORMS)


def configurations(labels: Row) -> Iterator[Configuration]:
    """Other slices, warps and stages of the kernels of the states, other slices of those of the gradients, segments."""
    D = labels["shape"][-1]
    own = chunk_config(D, D, torch.bfloat16, (9, 0))
    found = [
        replace(own, state_BV=BV, state_warps=warps, state_stages=n, grad_BV=BV, grad_warps=warps, grad_stages=n)
        for (BV, warps), n in itertools.product(((D, 8), (D, 4), (D // 2, 4)), (1, 2, 3, 4))
    ]
    found += [replace(own, input_BV=BV, output_BV=BV, pair_BV=BV) for BV in (32, 64, 128) if BV <= D]
    yield from ({(launch_plan, "chunk_config"): Always(config)} for config in found)
    yield from ({(chunk, "segments_for"): Always(segments)} for segments in (1, 4, 8, 16, 32))


BENCHMARK = Benchmark(
    rows, measure, {"shape": "B, T, HQ, HV = HK, K = V; log decays in (-1, 0)"}, configurations=configurations
)
