"""Times the delta rule with a decay per channel beside other implementations.

    python -m deltanet_kernels.benchmarks.channel_gates --peers

Peers: flash-linear-attention's `chunk_kda`, `chunk_gla` and `chunk_gdn2`. Every timed configuration is first compared
with the chunked PyTorch form in float64, output and gradients, on the first head of the first row; an implementation
that fails there is not timed. Where the peer was timed too, `fwd_ratio` and `fwdbwd_ratio` are its times divided by
ours. Each row is written as soon as it is measured, or with its error if it raises; `--resume` continues an incomplete
file.
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

from ..channel_gates.arguments import ChannelCall
from ..channel_gates.chunk import chunk_channel_gated_delta_rule_triton
from ..channel_gates.cpu import chunked
from .timing import RESULTS, graph_us, median_ms, peak_gib, write

SHAPE_NOTE = "B, T, H, K = V; log decays of every channel in (gates[0], 0); gdn2: erase gates in (0, 1), beta = 1"
Operator = Callable[..., torch.Tensor]


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


def make(rule: str, shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, g and the rule's further inputs, and a gradient of o; everything but g and beta in bfloat16.

    kda: beta in (0, 1). gla: nothing. gdn2: erase and write gates; k has unit length.
    """
    torch.manual_seed(0)
    B, T, H, D, g = shape
    size = (B, T, H, D)
    q, k, v, do = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [q, k, v, g * torch.rand(size, device="cuda")]
    if rule == "kda":
        leaves.append(torch.rand(B, T, H, device="cuda"))
    elif rule == "gdn2":
        leaves += [torch.rand(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
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


def implementations(rule: str, peers: bool) -> tuple[dict[str, Operator], dict[str, str]]:
    """Name -> operator on the leaves of `make`, and name -> why it is missing."""
    found: dict[str, Operator] = {
        "deltanet": lambda *leaves: chunk_channel_gated_delta_rule_triton(_call(rule, list(leaves)))[0]
    }
    missing: dict[str, str] = {}
    if not peers:
        return found, missing
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    try:
        if rule == "kda":
            from fla.ops.kda import chunk_kda

            found["fla"] = lambda q, k, v, g, b: chunk_kda(q, k, v, g, b, use_qk_l2norm_in_kernel=True)[0]
        elif rule == "gla":
            from fla.ops.gla import chunk_gla

            found["fla"] = lambda q, k, v, g: chunk_gla(q, k, v, g)[0]
        else:
            from fla.ops.gdn2 import chunk_gdn2

            found["fla"] = lambda q, k, v, g, b, w: chunk_gdn2(q, k, v, g, b, w)[0]
    except Exception as error:
        missing[f"fla, {rule}"] = repr(error)
    return found, missing


@functools.lru_cache(maxsize=1)
def reference(rule: str, shape: Shape) -> list[torch.Tensor]:
    """o and the gradients of the leaves of the first row and head of `make`, in float64."""
    leaves, do = make(rule, shape)
    own = [x.detach()[:1, :, :1].double().requires_grad_() for x in leaves]
    o, _ = chunked(_call(rule, own))
    return [o.detach(), *torch.autograd.grad(o, own, do[:1, :, :1].double())]


def worst_error(operator: Operator, leaves: list[torch.Tensor], do: torch.Tensor, wanted: list[torch.Tensor]) -> float:
    """Largest relative L2 error among o and the gradients; NaN counts as infinite."""
    o = operator(*leaves)
    found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    errors = [((x[:1, :, :1].double() - y).norm() / y.norm()).item() for x, y in zip(found, wanted, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


def measure(name: str, operator: Operator, rule: str, shape: Shape, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    leaves, do = make(rule, shape)
    row: dict[str, Any] = {**shape.labels(rule), "impl": name}
    row["rel_error"] = worst_error(operator, leaves, do, reference(rule, shape))
    if row["rel_error"] > 0.05:
        return row | {"failed": "wrong results"}

    def forward() -> None:
        with torch.no_grad():
            operator(*leaves)

    def both() -> None:
        torch.autograd.grad(operator(*leaves), leaves, do)

    row["fwd_ms"] = round(median_ms(forward, repeats), 4)
    row["fwdbwd_ms"] = round(median_ms(both, repeats), 4)
    row["peak_gib"] = round(peak_gib(both), 4)
    if name == "deltanet":
        row["fwdbwd_graph_ms"] = round(graph_us(both, 1, repeats) / 1e3, 4)
    return row


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, ours with the ratios to the peer of the same rule and shape."""
    peers = {(r["rule"], str(r["shape"]), str(r["gates"])): r for r in rows if r["impl"] == "fla" and "fwd_ms" in r}
    found = []
    for row in rows:
        peer = peers.get((row["rule"], str(row["shape"]), str(row["gates"])))
        if row["impl"] == "deltanet" and peer is not None and "fwd_ms" in row:
            ratios = {f"{n}_ratio": round(peer[f"{n}_ms"] / row[f"{n}_ms"], 2) for n in ("fwd", "fwdbwd")}
            row = row | ratios
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="Also time flash-linear-attention.")
    parser.add_argument("--rules", nargs="*", choices=RULES, default=RULES, help="Time only these rules.")
    parser.add_argument("--shapes", type=int, nargs="*", help="Time only these indices of the list of shapes.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=8, help="Start no further row after this many minutes.")
    parser.add_argument(
        "--resume", action="store_true", help="Keep the rows of the result file and add the missing ones."
    )
    parser.add_argument("--output", type=Path, help="Folder of the result file (default: the package's own).")
    args = parser.parse_args()
    began = time.monotonic()
    path = (args.output or RESULTS) / "channel_gates_h200.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if args.resume and path.exists() else []
    rows = [row for row in rows if "failed" not in row]
    done = {(row["rule"], Shape(*row["shape"], *row["gates"][:1]), row["impl"]) for row in rows}
    missing: dict[str, str] = {}

    def save() -> None:
        write(path.name, with_ratios(rows), {"missing": missing, "shape": SHAPE_NOTE}, args.output)

    for shape in [SHAPES[index] for index in args.shapes or range(len(SHAPES))]:
        for rule in args.rules:
            found, reasons = implementations(rule, args.peers)
            missing |= reasons
            for name, operator in found.items():
                if (rule, shape, name) in done:
                    continue
                if time.monotonic() - began > 60 * args.minutes:
                    missing[f"{name} at {shape.labels(rule)}"] = "not reached in time"
                    continue
                try:
                    row = measure(name, operator, rule, shape, args.repeats)
                except Exception as error:
                    row = {**shape.labels(rule), "impl": name, "failed": f"{type(error).__name__}: {error}"[:300]}
                rows.append(row)
                print(row, flush=True)
                torch.cuda.empty_cache()
                save()
    save()


if __name__ == "__main__":
    main()
