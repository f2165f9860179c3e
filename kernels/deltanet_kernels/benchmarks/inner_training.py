"""Times the operators of inner training on a GPU: `python -m deltanet_kernels.benchmarks.inner_training`.

Mesa (by its kernels, and in PyTorch), test-time training and Titans' memory in bfloat16, beside the gated delta rule;
forward, forward + backward, and the memory of the latter. Each result is compared with the recurrence in float64 first,
on a shorter input.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import (
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
from ..arguments import RuleCall
from ..mesa.cpu import chunk_mesa_torch
from ..mesa.solve import STEPS
from ..mesa.state import check_mesa
from .timing import median_ms, peak_gib, write

SHAPES = ((4, 2048, 9, 64), (1, 8192, 16, 128))  # B, T, heads, head size
CHECKED = 200  # tokens of the comparison


def mesa_in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ridge: Tensor, use_qk_l2norm_in_kernel: bool
) -> Any:
    """`chunk_mesa` by its PyTorch form."""
    call = RuleCall(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return chunk_mesa_torch(call, ridge, check_mesa(call, ridge, None), STEPS)


def rules(heads: int, size: int) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """Per operator its chunk form, its recurrence, and the arguments after q, k, v and its gates."""
    ones = torch.ones(heads, size, device="cuda")
    first = size**0.5 * torch.eye(size + 1, size, device="cuda").expand(heads, -1, -1)
    return {
        "gated delta rule": (chunk_gated_delta_rule, naive_gated_delta_rule, ()),
        "mesa": (chunk_mesa, naive_mesa, (ones,)),
        "mesa, PyTorch": (mesa_in_pytorch, naive_mesa, (ones,)),
        "ttt": (chunk_ttt, naive_ttt, (16,)),
        "ttt, layer norm": (chunk_ttt, naive_ttt, (16, InnerNorm(ones, torch.zeros_like(ones), first))),
        "titans": (chunk_titans, naive_titans, ()),
    }


def draw(batch: int, tokens: int, heads: int, size: int, name: str) -> list[Tensor]:
    """q, k, v in bfloat16 and the gates of an operator in float32, as leaves."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta, mu = (torch.rand(batch, tokens, heads, device="cuda") for _ in range(3))
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
    pairs = zip(found, wanted, strict=True)
    return max(float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="Folder of the result file (default: the package's own).")
    arguments = parser.parse_args()
    rows = []
    for batch, tokens, heads, size in SHAPES:
        for name, (chunk, naive, rest) in rules(heads, size).items():
            given = draw(batch, tokens, heads, size, name)
            weight = torch.randn_like(given[2])

            def forward(chunk: Any = chunk, given: Any = given, rest: Any = rest) -> Tensor:
                return chunk(*given, *rest, use_qk_l2norm_in_kernel=True)[0]  # type: ignore[no-any-return]

            def both(forward: Any = forward, given: Any = given, weight: Any = weight) -> None:
                torch.autograd.grad(forward(), given, weight)

            row = {
                "operator": name,
                "shape": [batch, tokens, heads, size],
                "error": round(error(name, chunk, naive, rest, size), 6),
            }
            with torch.no_grad():
                row["forward_ms"] = round(median_ms(forward), 3)
            row["both_ms"] = round(median_ms(both), 3)
            row["peak_gib"] = round(peak_gib(both), 3)
            rows.append(row)
            print(row, flush=True)
    print(write("inner_training_h200.json", rows, {"dtype": "bfloat16"}, arguments.output))


if __name__ == "__main__":
    main()
