"""Times the operators of inner training on a GPU: `python -m measuring.kernels.inner_training --peers`.

Mesa (by its kernels, and in PyTorch), test-time training and Titans' memory in bfloat16, beside the gated delta rule;
forward, forward + backward, and the memory of the latter. Each implementation is first compared with the recurrence in
float64, on a shorter input; one that fails there is not timed.

With `--peers`, the rows of `fla` are those of flash-linear-attention's `chunk_mesa_net`, with the ridge and the number
of steps of ours; `forward_ratio` and `both_ratio` of `mesa` are its times divided by ours. It always takes all the
steps, computes in float16 and bfloat16 instead of float32, and has no factor on its output, so it is compared with a
scale of 1. Each row is written as soon as it is measured, or with its error if it raises; `--resume` continues an
incomplete file; delete a row to have it measured again.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
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
from measuring.kernels.table import SHAPES, Row, Table, add_options
from measuring.kernels.timing import median_ms, peak_gib

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
    """Relative error of outputs and gradients of q, k, v, the largest of them; NaN counts as infinite.

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
    pairs = zip(found, wanted, strict=True)
    errors = [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
    return max(e if e == e else float("inf") for e in errors)


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The numbers of the row with these labels."""
    name, (batch, tokens, heads, size) = labels["operator"], labels["shape"]
    chunk, naive, rest = rule(name, labels["impl"], heads, size)
    given = draw(batch, tokens, heads, size, name)
    weight = torch.randn_like(given[2])

    def forward() -> Tensor:
        return chunk(*given, *rest, use_qk_l2norm_in_kernel=True)[0]  # type: ignore[no-any-return]

    def both() -> None:
        torch.autograd.grad(forward(), given, weight)

    with time_limit(options.first_seconds), compiled_ahead():
        row: Row = {"error": round(error(name, chunk, naive, rest, size), 6)}
        if row["error"] > 0.05:
            return row | {"failed": "wrong results"}
        both()
    with torch.no_grad():
        row["forward_ms"] = round(median_ms(forward, options.repeats), 3)
    row["both_ms"] = round(median_ms(both, options.repeats), 3)
    return row | {"peak_gib": round(peak_gib(both), 3)}


def rows(operators: Sequence[str], peers: bool) -> Iterator[Row]:
    """Labels of the rows in the order of measurement: Mesa before the others, the slowest last."""
    mesa = [("mesa", impl) for impl in (("deltanet", "fla") if peers else ("deltanet",)) if "mesa" in operators]
    every = mesa + [(name, "deltanet") for name in operators if name != "mesa"]
    for shapes, order in ((SHAPES[:1], mesa), (PYTORCH_SHAPES, every), (SHAPES[1:], mesa)):
        for shape in shapes:
            for name, impl in order:
                yield {"operator": name, "shape": list(shape), "impl": impl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="Also time flash-linear-attention's Mesa.")
    parser.add_argument("--operators", nargs="*", choices=OPERATORS, default=OPERATORS, help="Time only these.")
    add_options(parser)
    options = parser.parse_args()
    table = Table(
        "inner_training_h200.json", ("operator", "shape"), ("forward_ms", "both_ms"), {"dtype": "bfloat16"}, options
    )
    table.fill(rows(options.operators, options.peers), lambda labels: measure(labels, options))


if __name__ == "__main__":
    main()
