"""Times the forms of the erase term of the chunked gated delta rule, beside flash-linear-attention where it has them.

    python -m deltanet_kernels.benchmarks.erase --peers

q and k have unit length and no implementation normalises them. Implementations: `deltanet`; `mapped`, the default form
on inputs that make it compute the same (a strength of 2^-60 with values as much larger; a strength divided by the gate
and values multiplied with it); `fla`, which is `chunk_gated_delta_rule`, `chunk_simple_gla` or `chunk_comba`. Without
erasing all strengths are 1, because `chunk_simple_gla` has none; the others still compute the gradient of the strength.
Every implementation is first compared with the chunked PyTorch form in float64 on the first head of the first row,
output and gradients; one that fails there is not timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from .. import torch_chunk_gated_delta_rule
from ..arguments import RuleCall
from ..gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from .timing import median_ms, peak_gib, write

SHAPES = [(16, 2048, 9, 64), (8, 2048, 32, 64), (4, 4096, 32, 128), (1, 4096, 32, 128), (1, 32768, 32, 128)]
NOTES = {"shape": "B, T, H, K = V; log decays in (-1, 0); bfloat16"}
FORMS: dict[str, dict[str, Any]] = {
    "decayed": {},
    "off": {"erase": "off"},
    "undecayed": {"erase": "undecayed"},
    "undecayed, own key": {"erase": "undecayed", "own_key": True},
    "decayed, own key": {"own_key": True},
    "chunk_start, 16": {"erase": "chunk_start", "minibatch": 16},
}
TINY = 2.0**-60
Inputs = dict[str, Any]  # tensors


def make(shape: tuple[int, int, int, int], form: dict[str, Any]) -> tuple[Inputs, torch.Tensor]:
    """The inputs that get gradients, by name, and a gradient of o."""
    torch.manual_seed(0)
    B, T, H, D = shape
    q, k, p, v, do = (torch.randn(B, T, H, D, device="cuda") for _ in range(5))
    x = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    if form.get("own_key"):
        x["erase_key"] = 0.7 * F.normalize(p, dim=-1)
    x = {name: y.bfloat16() for name, y in x.items()}
    x["g"] = -torch.rand(B, T, H, device="cuda")
    if form.get("erase") != "off":
        strongest = 1 / form["minibatch"] if "minibatch" in form else 1.0
        x["beta"] = strongest * torch.rand(B, T, H, device="cuda")
    return {name: y.requires_grad_() for name, y in x.items()}, do.bfloat16()


def _options(form: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in form.items() if name != "own_key"}


def _strength(x: Inputs) -> torch.Tensor:
    beta: torch.Tensor = x["beta"] if "beta" in x else torch.ones_like(x["g"])
    return beta


def ours(form: dict[str, Any]) -> Callable[[Inputs], torch.Tensor]:
    """The operator."""
    return lambda x: chunk_gated_delta_rule_triton(RuleCall(**x | {"beta": _strength(x)}, **_options(form)))[0]


def mapped(form: dict[str, Any]) -> Callable[[Inputs], torch.Tensor] | None:
    """The default form on other inputs, where it can compute the same."""
    if form == FORMS["off"]:
        return lambda x: chunk_gated_delta_rule_triton(
            RuleCall(**x | {"beta": torch.full_like(x["g"], TINY), "v": x["v"] / TINY})
        )[0]
    if form == FORMS["undecayed"]:

        def run(x: Inputs) -> torch.Tensor:
            gate = x["g"].exp()
            values = (x["v"] * gate.unsqueeze(-1)).to(x["v"].dtype)
            return chunk_gated_delta_rule_triton(RuleCall(**x | {"beta": x["beta"] / gate, "v": values}))[0]

        return run
    return None


def peer(form: dict[str, Any]) -> Callable[[Inputs], torch.Tensor] | None:
    """flash-linear-attention's operator of this form, or None."""
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    if form == FORMS["off"]:
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda x: chunk_simple_gla(x["q"], x["k"], x["v"], x["g"])[0]
    if form == FORMS["decayed"]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda x: chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]
    if form.get("erase") == "undecayed":
        from fla.ops.comba import chunk_comba

        return lambda x: chunk_comba(
            x["q"], x["k"], x["v"], p=x.get("erase_key", x["k"]), g=x["g"], beta=x["beta"]
        )[0]  # fmt: skip
    return None


def worst_error(run: Callable[[Inputs], torch.Tensor], form: dict[str, Any], x: Inputs, do: torch.Tensor) -> float:
    """Largest relative L2 error of o and the gradients in the first head of the first row; NaN counts as infinite."""
    o = run(x)
    found = [o.detach(), *torch.autograd.grad(o, list(x.values()), do)]
    own = {name: y.detach()[:1, :, :1].double().requires_grad_() for name, y in x.items()}
    wanted_o, _ = torch_chunk_gated_delta_rule(**own | {"beta": _strength(own)}, **_options(form))
    wanted = [wanted_o.detach(), *torch.autograd.grad(wanted_o, list(own.values()), do[:1, :, :1].double())]
    errors = [
        ((y[:1, :, :1].double() - z).norm() / z.norm()).item() for y, z in zip(found, wanted, strict=True)
    ]  # fmt: skip
    return max(e if e == e else float("inf") for e in errors)


def measure(
    run: Callable[[Inputs], torch.Tensor], shape: tuple[int, int, int, int], form: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """The numbers of one row."""
    x, do = make(shape, form)
    row: dict[str, Any] = {"rel_error": worst_error(run, form, x, do)}
    if row["rel_error"] > 0.05:
        return row | {"failed": "wrong results"}

    def forward() -> None:
        with torch.no_grad():
            run(x)

    def both() -> None:
        torch.autograd.grad(run(x), list(x.values()), do)

    row["fwd_ms"] = round(median_ms(forward, repeats), 4)
    row["fwdbwd_ms"] = round(median_ms(both, repeats), 4)
    return row | {"peak_gib": round(peak_gib(both), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="Also time flash-linear-attention.")
    parser.add_argument("--forms", nargs="*", choices=list(FORMS), help="Time only these forms.")
    parser.add_argument("--shapes", type=int, nargs="*", help="Time only these indices of the list of shapes.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="Folder of the result file (default: the package's own).")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in [SHAPES[index] for index in args.shapes or range(len(SHAPES))]:
        for name in args.forms or FORMS:
            form = FORMS[name]
            for label, find in (("deltanet", ours), ("mapped", mapped), *([("fla", peer)] if args.peers else [])):
                row: dict[str, Any] = {"shape": list(shape), "form": name, "impl": label}
                try:
                    run = find(form)
                    if run is None:
                        continue
                    row |= measure(run, shape, form, args.repeats)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {error}"[:300]
                rows.append(row)
                print(row, flush=True)
                torch.cuda.empty_cache()
                write("erase_h200.json", rows, NOTES, args.output)


if __name__ == "__main__":
    main()
