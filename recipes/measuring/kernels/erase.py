"""Times the forms of the erase term of the chunked gated delta rule, beside flash-linear-attention where it has them.

    python -m measuring.kernels erase --peers

q and k have unit length and no implementation normalises them. Implementations: `deltanet`; `mapped`, the default form
on inputs that make it compute the same (a strength of 2^-60 with values as much larger; a strength divided by the gate
and values multiplied with it); `fla`, which is `chunk_gated_delta_rule`, `chunk_simple_gla`, `chunk_comba` or
`chunk_gated_delta_product`. Without erasing all strengths are 1, because `chunk_simple_gla` has none; the others still
compute the gradient of the strength. Two writes per token (Gated DeltaProduct) are the default form on twice the
tokens, of which every second one decays and every other one is read; `deltanet` includes the filling of q and g. Every
implementation is first compared with the chunked PyTorch form in float64 on the first head of the first row, output and
gradients. At each shape the forms with a peer come first.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from deltanet_kernels import torch_chunk_gated_delta_rule
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from measuring.kernels.harness import SHAPES, Benchmark, check_and_time
from measuring.rows import Row

DEVICE = "cuda"
WRITES = "two writes per token"
FORMS: dict[str, dict[str, Any]] = {
    WRITES: {"writes": 2},
    "off": {"erase": "off"},
    "undecayed": {"erase": "undecayed"},
    "decayed": {},
}
PEERS = (WRITES, "off", "undecayed", "decayed")  # forms with one
MAPPED = ("off", "undecayed")
TINY = 2.0**-60
Shape = tuple[int, int, int, int]
Inputs = dict[str, Any]  # tensors


def make(shape: Shape, form: dict[str, Any]) -> tuple[Inputs, torch.Tensor]:
    """The inputs that get gradients, by name, and a gradient of o; with several writes k, v, beta have those tokens."""
    torch.manual_seed(0)
    B, T, H, D = shape
    writes = T * form.get("writes", 1)
    q, k, v, do = (torch.randn(B, n, H, D, device=DEVICE) for n in (T, writes, writes, T))
    x = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    x = {name: y.bfloat16() for name, y in x.items()}
    x["g"] = -torch.rand(B, T, H, device=DEVICE)
    if form.get("erase") != "off":
        x["beta"] = torch.rand(B, writes, H, device=DEVICE)
    return {name: y.requires_grad_() for name, y in x.items()}, do.bfloat16()


def arguments(x: Inputs, form: dict[str, Any]) -> Inputs:
    """Those of the operator: with several writes per token, the first one decays and the last one has the query."""
    x = x | {"beta": _strength(x)}
    further = form.get("writes", 1) - 1
    if further:
        x["q"] = F.pad(x["q"].unsqueeze(2), (0, 0, 0, 0, further, 0)).flatten(1, 2)
        x["g"] = F.pad(x["g"].unsqueeze(2), (0, 0, 0, further)).flatten(1, 2)
    return x | {name: value for name, value in form.items() if name not in ("own_key", "writes")}


def read(o: torch.Tensor, form: dict[str, Any]) -> torch.Tensor:
    """The outputs after the last write of each token."""
    writes = form.get("writes", 1)
    return o[:, writes - 1 :: writes]


def _strength(x: Inputs) -> torch.Tensor:
    beta: torch.Tensor = x["beta"] if "beta" in x else torch.ones_like(x["g"])
    return beta


def ours(x: Inputs, form: dict[str, Any]) -> torch.Tensor:
    """The operator."""
    return read(chunk_gated_delta_rule_triton(RuleCall(**arguments(x, form)))[0], form)


def mapped(x: Inputs, form: dict[str, Any]) -> torch.Tensor:
    """The default form on other inputs, where it can compute the same."""
    if form == FORMS["off"]:
        other = {"beta": torch.full_like(x["g"], TINY), "v": x["v"] / TINY}
    else:
        gate = x["g"].exp()
        other = {"beta": x["beta"] / gate, "v": (x["v"] * gate.unsqueeze(-1)).to(x["v"].dtype)}
    return chunk_gated_delta_rule_triton(RuleCall(**x | other))[0]


def peer(x: Inputs, form: dict[str, Any]) -> torch.Tensor:
    """flash-linear-attention's operator of this form."""
    if form.get("erase") == "off":
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla(x["q"], x["k"], x["v"], x["g"])[0]
    if form.get("erase") == "undecayed":
        from fla.ops.comba import chunk_comba

        return chunk_comba(x["q"], x["k"], x["v"], p=x["k"], g=x["g"], beta=x["beta"])[0]
    if "writes" in form:
        from fla.ops.gated_delta_product import chunk_gated_delta_product

        return chunk_gated_delta_product(x["q"], x["k"], x["v"], x["g"], x["beta"], form["writes"])[0]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"])[0]


IMPLEMENTATIONS = {"deltanet": ours, "mapped": mapped, "fla": peer}


@functools.lru_cache(maxsize=1)
def reference(shape: Shape, name: str) -> list[torch.Tensor]:
    """o and the gradients of the inputs of the first row and head of `make`, in float64."""
    form = FORMS[name]
    x, do = make(shape, form)
    own = {key: y.detach()[:1, :, :1].double().requires_grad_() for key, y in x.items()}
    o = read(torch_chunk_gated_delta_rule(**arguments(own, form))[0], form)
    return [o.detach(), *torch.autograd.grad(o, list(own.values()), do[:1, :, :1].double())]


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    shape, form, run = tuple(labels["shape"]), FORMS[labels["form"]], IMPLEMENTATIONS[labels["impl"]]
    x, do = make(shape, form)
    return check_and_time(lambda: run(x, form), list(x.values()), do, reference(shape, labels["form"]), options)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows in the order of measurement: at each shape first what has a peer, then the others."""
    beside = PEERS if peers else ()
    order = [(name, impl) for name in beside for impl in ("deltanet", "fla")]
    order += [(name, "deltanet") for name in FORMS if name not in beside]
    order += [(name, "mapped") for name in MAPPED]
    for shape in SHAPES:
        for name, impl in order:
            yield {"shape": list(shape), "form": name, "impl": impl}


BENCHMARK = Benchmark(rows, measure, {"shape": "B, T, H, K = V; log decays in (-1, 0); bfloat16"})
