"""Times the operators of inner training on a GPU: `python -m measuring.kernels inner_training --peers`.

Mesa (by its kernels, and in PyTorch), test-time training and Titans' memory in bfloat16, beside the gated delta rule.
Each implementation is first compared with the recurrence in float64, on a shorter input.

The rows of `fla` are those of flash-linear-attention's `chunk_mesa_net`, with the ridge and the number of steps of
ours. It always takes all the steps, computes in float16 and bfloat16 instead of float32, and has no factor on its
output, so it is compared with a scale of 1.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deltanet_kernels import (
    InnerNorm,
    chunk_gated_delta_rule,
    chunk_mesa,
    chunk_titans,
    chunk_ttt,
    naive_gated_delta_rule,
    naive_mesa,
    naive_titans,
    naive_ttt,
)
from deltanet_kernels.mesa.calls import MesaCall
from deltanet_kernels.mesa.cpu import chunk_mesa_torch
from deltanet_kernels.mesa.solve import STEPS
from measuring.kernels.first_results import compiled_ahead, time_limit
from measuring.kernels.harness import MOST, SHAPES, Benchmark, check_and_time, relative_error
from measuring.rows import Row

PYTORCH_SHAPES = [
    (4, 2048, 9, 64),
    (1, 8192, 16, 128),
]  # those of `SHAPES` are too large for PyTorch
OPERATORS = ("mesa", "gated delta rule", "mesa, PyTorch", "ttt", "titans", "ttt, layer norm")
DEVICE = "cuda"
CHECKED = 200  # tokens of the comparison


def mesa_of_peer(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, use_qk_l2norm_in_kernel: bool
) -> Any:
    """flash-linear-attention's operator with the steps of ours."""
    from fla.ops.mesa_net import chunk_mesa_net

    return chunk_mesa_net(
        q, k, v, g, beta, ridge, max_CG_iteration=STEPS, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )


def mesa_in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, use_qk_l2norm_in_kernel: bool
) -> Any:
    """`chunk_mesa` by its PyTorch form."""
    return chunk_mesa_torch(MesaCall(q, k, v, g, beta, ridge, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel))


def rule(name: str, impl: str, heads: int, size: int) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    """An operator's chunk form, its recurrence, and the arguments after q, k, v and its gates."""
    ones = torch.ones(heads, size, device=DEVICE)
    if impl == "fla":
        return mesa_of_peer, functools.partial(naive_mesa, scale=1.0), (ones,)
    first = size**0.5 * torch.eye(size + 1, size, device=DEVICE).expand(heads, -1, -1)
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "gated delta rule": (chunk_gated_delta_rule, naive_gated_delta_rule, ()),
        "mesa": (chunk_mesa, naive_mesa, (ones,)),
        "mesa, PyTorch": (mesa_in_pytorch, naive_mesa, (ones,)),
        "ttt": (chunk_ttt, naive_ttt, (16,)),
        "ttt, layer norm": (chunk_ttt, naive_ttt, (16, InnerNorm(ones, torch.zeros_like(ones), first))),
        "titans": (chunk_titans, naive_titans, ()),
    }
    return found[name]


def draw(batch: int, tokens: int, heads: int, size: int, name: str) -> list[Tensor]:
    """q, k, v in bfloat16 and the gates of an operator in float32, as leaves."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, heads, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    g, beta, mu = (torch.rand(batch, tokens, heads, device=DEVICE) for _ in range(3))
    beta = beta / 16 if name.startswith("ttt") else beta
    gates = [-0.05 * g, mu.log(), beta] if name == "titans" else [-0.05 * g, beta]
    return [x.requires_grad_() for x in (q, k, v, *gates)]


def error(name: str, chunk: Callable[..., Any], naive: Callable[..., Any], rest: tuple[Any, ...], size: int) -> float:
    """Relative error of outputs and gradients of q, k, v, the largest of them.

    The gradients are those of a random projection of the outputs. Of their squares the layer norm would leave next to
    nothing: its outputs have the same length whatever it reads.
    """
    given = draw(1, CHECKED, len(rest[0]) if name.startswith("mesa") else 2, size, name)
    heads = given[0].shape[2]
    rest = tuple(InnerNorm(*(y[:heads] for y in x)) if isinstance(x, InnerNorm) else x for x in rest)
    exact = [x.detach().double().requires_grad_() for x in given]
    wide = tuple(InnerNorm(*(y.double() for y in x)) if isinstance(x, InnerNorm) else x for x in rest)
    pull = torch.randn_like(given[2])
    found, wanted = (
        [o, *torch.autograd.grad(o, leaves[:3], pull.to(o.dtype))]
        for leaves, o in (
            (given, chunk(*given, *rest, use_qk_l2norm_in_kernel=True)[0]),
            (exact, naive(*exact, *wide, use_qk_l2norm_in_kernel=True)[0]),
        )
    )
    return max(relative_error(a.detach(), b.detach()) for a, b in zip(found, wanted, strict=True))


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    name, (batch, tokens, heads, size) = labels["operator"], labels["shape"]
    chunk, naive, rest = rule(name, labels["impl"], heads, size)
    with time_limit(options.first_seconds), compiled_ahead():
        row: Row = {"rel_error": error(name, chunk, naive, rest, size)}
    if row["rel_error"] > MOST:
        return row | {"error": "wrong results"}
    given = draw(batch, tokens, heads, size, name)

    def forward() -> Tensor:
        return chunk(*given, *rest, use_qk_l2norm_in_kernel=True)[0]  # type: ignore[no-any-return]

    return row | check_and_time(forward, given, torch.randn_like(given[2]), None, options)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows in the order of measurement: Mesa before the others, the slowest last."""
    mesa = [("mesa", impl) for impl in (("deltanet", "fla") if peers else ("deltanet",))]
    every = mesa + [(name, "deltanet") for name in OPERATORS if name != "mesa"]
    for shapes, order in ((SHAPES[:1], mesa), (PYTORCH_SHAPES, every), (SHAPES[1:], mesa)):
        for shape in shapes:
            for name, impl in order:
                yield {"operator": name, "shape": list(shape), "impl": impl}


BENCHMARK = Benchmark(rows, measure, {"dtype": "bfloat16"})
