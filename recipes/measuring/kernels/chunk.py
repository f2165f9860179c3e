"""Times the chunked gated delta rule beside other implementations.

    python -m measuring.kernels.chunk --peers

Peers: flash-linear-attention (with FLA_FLASH_QLA=0), FlashQLA (K = V = 128 only), FlashInfer (K = V = 128, forward
only, on inputs prepared outside the timing) and causal softmax attention (SDPA) of the same sizes. Every timed
configuration is first compared with the chunked PyTorch form in float64, output and gradients, on the first key head of
the first row; an implementation that fails there is not timed. `deltanet` and `sdpa` are also timed as a CUDA graph
(fwdbwd_graph_ms), because the host limits short calls. Each row is written as soon as it is measured, or with its error
if it raises; `--resume` continues an incomplete file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deltanet_kernels import torch_chunk_gated_delta_rule
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from measuring.kernels import flashinfer_prefill
from measuring.kernels.timing import RESULTS, graph_us, median_ms, peak_gib, write

SHAPE_NOTE = "B, T, H (q, k), HV (v), K = V; log decays in (-1, 0) or in `gates`"
Operator = Callable[..., torch.Tensor]


class Shape(NamedTuple):
    """Rows, tokens, query and key heads, value heads, head size; the strongest log decay."""

    B: int
    T: int
    H: int
    HV: int
    D: int
    g: float = -1.0

    def labels(self) -> dict[str, Any]:
        """The shape in a row of the result file; without the key `gates` log decays are in (-1, 0)."""
        return {"shape": list(self[:5])} | ({} if self.g == -1.0 else {"gates": [self.g, 0.0]})


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
]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    if q.shape[2] != v.shape[2]:  # softmax attention has query heads over fewer key and value heads, not the reverse
        raise NotImplementedError("more value heads than query heads")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return chunk_gated_delta_rule_triton(RuleCall(q, k, v, g, beta, use_qk_l2norm_in_kernel=True))[0]


def implementations(peers: bool) -> tuple[dict[str, Operator], dict[str, str]]:
    """Name -> operator, and name -> why it is missing."""
    found: dict[str, Operator] = {"deltanet": _ours}
    missing: dict[str, str] = {}
    if not peers:
        return found, missing
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_rule

        found["fla"] = lambda q, k, v, g, b: fla_rule(q, k, v, g, b, use_qk_l2norm_in_kernel=True)[0]
    except Exception as error:
        missing["fla"] = repr(error)
    try:
        from flash_qla import chunk_gated_delta_rule as qla_rule

        found["flash_qla"] = lambda q, k, v, g, b: qla_rule(q, k, v, g, b, use_qk_l2norm_in_kernel=True)[0]
    except Exception as error:
        missing["flash_qla"] = repr(error)
    try:
        found["flashinfer"] = functools.partial(flashinfer_prefill.forward, flashinfer_prefill.rule())
    except Exception as error:
        missing["flashinfer"] = repr(error)
    return found | {"sdpa": _sdpa}, missing


def make(shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v in bfloat16, log decay in (g, 0), beta in (0, 1), and a gradient of o."""
    torch.manual_seed(0)
    B, T, H, HV, D, g = shape
    heads = (H, H, HV)
    leaves = [torch.randn(B, T, n, D, device="cuda", dtype=torch.bfloat16) for n in heads]
    leaves += [g * torch.rand(B, T, HV, device="cuda"), torch.rand(B, T, HV, device="cuda")]
    return [x.requires_grad_() for x in leaves], torch.randn(B, T, HV, D, device="cuda", dtype=torch.bfloat16)


@functools.lru_cache(maxsize=1)
def reference(shape: Shape) -> list[torch.Tensor]:
    """o and the gradients of q, k, v, g, beta of the first row and key head of `make(shape)`, in float64."""
    leaves, do = make(shape)
    heads = shape.HV // shape.H
    own = [x.detach()[:1, :, : (1 if j < 2 else heads)].double().requires_grad_() for j, x in enumerate(leaves)]
    q, k, v, g, beta = own
    o, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    return [o.detach(), *torch.autograd.grad(o, own, do[:1, :, :heads].double())]


def worst_error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest relative L2 error among o and the gradients; NaN counts as infinite."""
    errors = []
    for x, y in zip(found, wanted, strict=True):
        part = x[:1, :, : y.shape[2]].double()
        errors.append(((part - y).norm() / y.norm()).item())
    return max(e if e == e else float("inf") for e in errors)


def measure(name: str, operator: Operator, shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    leaves, do = make(shape)
    row: dict[str, Any] = {**shape.labels(), "impl": name}
    forward_only = name == "flashinfer"
    if forward_only:
        leaves = flashinfer_prefill.prepare(leaves)
    if name != "sdpa":
        o = operator(*leaves)
        gradients = [] if forward_only else torch.autograd.grad(o, leaves, do)
        row["rel_error"] = worst_error([o.detach(), *gradients], reference(shape)[: 1 + len(gradients)])
        if row["rel_error"] > 0.05:
            return row | {"failed": "wrong results"}
        del o, gradients

    def forward() -> None:
        with torch.no_grad():
            operator(*leaves)

    def both() -> None:
        torch.autograd.grad(operator(*leaves), leaves[:3] if name == "sdpa" else leaves, do)

    row["fwd_ms"] = round(median_ms(forward, repeats), 4)
    if forward_only:
        return row
    row["fwdbwd_ms"] = round(median_ms(both, repeats), 4)
    row["peak_gib"] = round(peak_gib(both), 4)
    if name in ("deltanet", "sdpa"):
        row["fwdbwd_graph_ms"] = round(graph_us(both, 1, repeats) / 1e3, 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="Also time the peers that are installed, and SDPA.")
    parser.add_argument("--only", nargs="*", help="Time only these implementations.")
    parser.add_argument("--shapes", type=int, nargs="*", help="Time only these indices of the list of shapes.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=8, help="Start no further row after this many minutes.")
    parser.add_argument(
        "--resume", action="store_true", help="Keep the rows of the result file and add the missing ones."
    )
    parser.add_argument("--output", type=Path, help="Folder of the result file (default: the package's own).")
    args = parser.parse_args()
    began = time.monotonic()
    found, missing = implementations(args.peers)
    found = {name: operator for name, operator in found.items() if name in (args.only or found)}
    path = (args.output or RESULTS) / "chunk_h200.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if args.resume and path.exists() else []
    done = {(Shape(*row["shape"], *row.get("gates", [])[:1]), row["impl"]) for row in rows if "failed" not in row}
    rows = [row for row in rows if "failed" not in row]
    for shape in [SHAPES[index] for index in args.shapes or range(len(SHAPES))]:
        for name, operator in found.items():
            if (shape, name) in done or (name == "sdpa" and shape.g != -1.0):  # softmax has no gates
                continue
            if time.monotonic() - began > 60 * args.minutes:
                missing[f"{name} at {shape.labels()}"] = "not reached in time"
                continue
            try:
                row = measure(name, operator, shape, args.repeats)
            except Exception as error:
                row = {**shape.labels(), "impl": name, "failed": f"{type(error).__name__}: {error}"[:300]}
            rows.append(row)
            print(row, flush=True)
            torch.cuda.empty_cache()
            write(path.name, rows, {"missing": missing, "shape": SHAPE_NOTE}, args.output)
    write(path.name, rows, {"missing": missing, "shape": SHAPE_NOTE}, args.output)


if __name__ == "__main__":
    main()
