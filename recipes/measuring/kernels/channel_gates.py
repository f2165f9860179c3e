"""Times the delta rule with a decay per channel beside other implementations.

    python -m measuring.kernels channel_gates --peers

Peers: flash-linear-attention's `chunk_kda`, `chunk_gla` and `chunk_gdn2`; `fla_bounded` is `chunk_kda` told that no log
decay is below -5 (`safe_gate`), with which it takes matrix products throughout. q and k are normalised in the call for
`kda`, before it for the others. Every configuration is first compared with the chunked PyTorch form in float64, output
and gradients, on the first head of the first row.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton
from deltanet_kernels.channel_gates.cpu import chunked
from measuring.kernels.harness import Benchmark, Operator, check_and_time, in_float64
from measuring.rows import Row


class Shape(NamedTuple):
    """Rows, tokens, heads, head size; the strongest log decay."""

    B: int
    T: int
    H: int
    D: int
    g: float = -1.0

    def labels(self, rule: str) -> dict[str, Any]:
        """The shape in a row of the result file."""
        return {"rule": rule, "shape": list(self[:4]), "gates": [self.g, 0.0]}


DEVICE = "cuda"
SHAPES = [
    Shape(16, 2048, 9, 64),
    Shape(8, 2048, 32, 64),
    Shape(4, 4096, 32, 128),
    Shape(1, 4096, 32, 128),
    Shape(1, 32768, 32, 128),
    Shape(1, 131072, 16, 128),
    # Gates so strong that no chunk is one product (channel_gates/decay.py).
    Shape(4, 4096, 32, 128, -5.0),
    Shape(8, 2048, 32, 64, -5.0),
]
RULES = ("kda", "gla", "gdn2")
BOUNDED = "fla_bounded"


def make(rule: str, shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, g and the rule's further inputs, and a gradient of o; everything but g and beta in bfloat16.

    kda: beta in (0, 1). gla: nothing. gdn2: erase and write gates; k has unit length.
    """
    torch.manual_seed(0)
    B, T, H, D, g = shape
    size = (B, T, H, D)
    q, k, v, do = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    leaves = [q, k, v, g * torch.rand(size, device=DEVICE)]
    if rule == "kda":
        leaves.append(torch.rand(B, T, H, device=DEVICE))
    elif rule == "gdn2":
        leaves += [torch.rand(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    if rule != "kda":  # only the operators with erasing normalise, and the erase key has to fit the key
        leaves[:2] = [x / x.float().norm(dim=-1, keepdim=True).to(x.dtype) for x in leaves[:2]]
    return [x.requires_grad_() for x in leaves], do


def _call(rule: str, leaves: list[torch.Tensor]) -> ChannelCall:
    q, k, v, g, *rest = leaves
    if rule == "kda":
        return ChannelCall(q, k, v, g, rest[0], use_qk_l2norm_in_kernel=True)
    ones = g.new_ones(g.shape[:3])
    if rule == "gla":
        return ChannelCall(q, k, v, g, ones, erase=False)
    b, w = rest
    return ChannelCall(q, k, w * v, g, ones, b * k)


def ours(rule: str) -> Operator:
    """The operator, on the leaves of `make`."""
    return lambda *leaves: chunk_channel_gated_delta_rule_triton(_call(rule, list(leaves)))[0]


def peer(rule: str, bounded: bool) -> Operator:
    """flash-linear-attention's operator, on the leaves of `make`; `bounded` tells `kda` that log decays are over -5."""
    if rule == "kda":
        from fla.ops.kda import chunk_kda

        return lambda *leaves: chunk_kda(*leaves, use_qk_l2norm_in_kernel=True, safe_gate=bounded)[0]
    if rule == "gla":
        from fla.ops.gla import chunk_gla

        return lambda q, k, v, g: chunk_gla(q, k, v, g)[0]
    from fla.ops.gdn2 import chunk_gdn2

    return lambda q, k, v, g, b, w: chunk_gdn2(q, k, v, g, b, w)[0]


@functools.lru_cache(maxsize=1)
def reference(rule: str, shape: Shape) -> list[torch.Tensor]:
    """o and the gradients of the leaves of the first row and head of `make`, in float64."""
    leaves, do = make(rule, shape)
    return in_float64(lambda *own: chunked(_call(rule, list(own)))[0], leaves, do, [1] * len(leaves))


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    rule, shape = labels["rule"], Shape(*labels["shape"], *labels["gates"][:1])
    operator = ours(rule) if labels["impl"] == "deltanet" else peer(rule, labels["impl"] == BOUNDED)
    leaves, do = make(rule, shape)
    return check_and_time(lambda: operator(*leaves), leaves, do, reference(rule, shape), options)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows in the order of measurement: every rule and its peer before the next shape."""
    for shape in SHAPES:
        for rule in RULES:
            beside = ("fla", BOUNDED) if rule == "kda" else ("fla",)
            for name in ("deltanet", *(beside if peers else ())):
                yield {**shape.labels(rule), "impl": name}


BENCHMARK = Benchmark(
    rows,
    measure,
    {"shape": "B, T, H, K = V; log decays of every channel in (gates[0], 0); gdn2: erase gates in (0, 1), beta = 1"},
)
