"""Calls on which every form of the attention over window and sinks is tested."""

from dataclasses import dataclass
from typing import Any

import torch

from deltanet_kernels.window.reference import naive_window_attention


@dataclass(frozen=True)
class Case:
    """One call of the attention."""

    name: str
    T: int
    window: int
    sinks: int
    B: int = 1
    HQ: int = 2
    HK: int = 1
    D: int = 16
    cu_seqlens: tuple[int, ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    edge: int = 1
    size: float = 1.0  # factor of q, and so of the scores
    condition: float = 1.0  # factor on tolerances: how much the problem itself amplifies rounding

    def __str__(self) -> str:
        return self.name


CASES = [
    *(Case(f"T={T}", T=T, window=20, sinks=4, B=2) for T in (1, 4, 5, 20, 21, 24, 25, 97)),
    # windows and sinks around each other, tiles and the length
    Case("window 1, no sinks", T=70, window=1, sinks=0),
    Case("window 1, sinks", T=70, window=1, sinks=3),
    Case("window 2", T=70, window=2, sinks=1),
    Case("no sinks", T=100, window=33, sinks=0),
    Case("window 64", T=150, window=64, sinks=4),
    Case("window 65", T=150, window=65, sinks=4),
    Case("longer than the sequence", T=50, window=51, sinks=4),
    Case("as long as the sequence", T=50, window=50, sinks=4),
    Case("far longer than the sequence", T=7, window=2**31, sinks=2**31),
    Case("more sinks than the window", T=150, window=5, sinks=40),
    Case("more sinks than a tile", T=130, window=20, sinks=70),
    Case("sinks only in sight of all", T=40, window=3, sinks=40),
    # heads
    Case("nothing shared", T=70, window=20, sinks=4, HQ=3, HK=3, B=2),
    Case("six queries per key", T=70, window=20, sinks=4, HQ=12, HK=2),
    *(Case(f"D={D}", T=50, window=20, sinks=4, D=D) for D in (1, 8, 40, 100, 256)),
    # scores
    Case("scale", T=70, window=20, sinks=4, scale=-0.7),
    Case("scale 0", T=70, window=20, sinks=4, scale=0.0),
    # The last digit of a score of 400 is 3e-5 in float32.
    Case("large scores", T=70, window=20, sinks=4, size=100.0, condition=10),
    # capped scores: nearly all at the cap, on the bend, and far below; the last digit of a score of 30 is 2e-6
    Case("cap 0.5", T=70, window=20, sinks=4, softcap=0.5),
    Case("cap 2, packed", T=150, window=20, sinks=17, HQ=4, HK=2, cu_seqlens=(0, 10, 90, 140), softcap=2.0),
    Case("cap 50", T=150, window=33, sinks=4, size=5.0, softcap=50.0),
    Case("cap 30, large scores", T=70, window=20, sinks=4, size=100.0, softcap=30.0, condition=4),
    Case("cap 1000, no sinks, scale", T=70, window=20, sinks=0, scale=-0.7, softcap=1000.0),
    # windows that begin with groups of 32 tokens
    *(Case(f"edge, T={T}", T=T, window=33, sinks=4, B=2, edge=32) for T in (31, 33, 64, 65, 97)),
    Case("edge, own group alone", T=100, window=1, sinks=3, edge=32),
    Case("edge, window of any length", T=150, window=50, sinks=0, edge=32),
    Case("edge, heads, cap", T=150, window=65, sinks=4, HQ=6, HK=2, edge=32, softcap=2.0),
    Case("edge, packed", T=180, window=33, sinks=4, cu_seqlens=(0, 10, 160, 163, 180), edge=32),
    # packed sequences
    Case("packed", T=150, window=20, sinks=4, cu_seqlens=(0, 30, 95, 150)),
    Case("packed, empty and single", T=150, window=20, sinks=4, cu_seqlens=(0, 0, 1, 2, 2, 66, 130, 150, 150)),
    Case("packed, tokens after the last", T=90, window=20, sinks=4, HQ=4, HK=2, cu_seqlens=(0, 40, 41, 80)),
    Case("packed, nothing but empty", T=5, window=2, sinks=1, cu_seqlens=(0, 0, 0)),
    Case("packed, window 1", T=40, window=1, sinks=2, cu_seqlens=(0, 1, 4, 30, 40)),
    Case("packed, many short", T=60, window=4, sinks=2, cu_seqlens=tuple(range(0, 61, 3))),
    Case("packed, short and long", T=180, window=40, sinks=17, cu_seqlens=(0, 10, 160, 163, 180)),
]


def make(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Arguments of the call; q, k and v require gradients."""
    generator = torch.Generator().manual_seed(0)
    tokens = {
        name: (torch.randn(case.B, case.T, heads, case.D, generator=generator) * size).to(device, dtype)
        for name, heads, size in (("q", case.HQ, case.size), ("k", case.HK, 1.0), ("v", case.HK, 1.0))
    }
    offsets = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
    rest = {"window": case.window, "sinks": case.sinks, "scale": case.scale, "cu_seqlens": offsets}
    rest |= {"softcap": case.softcap, "edge": case.edge}
    return {name: x.requires_grad_() for name, x in tokens.items()} | rest


def results(function: Any, inputs: dict[str, Any], upstream: str = "both") -> dict[str, torch.Tensor]:
    """o, lse and the gradients of q, k and v, from random gradients of o, of lse or of both."""
    o, lse = function(**inputs)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).to(x.device) for x in (o, lse))
    do = do.bfloat16().half()  # rounded, so that it is the same number in every dtype
    outputs, grads = [], []
    if upstream != "lse":
        outputs, grads = [o], [do.to(o.dtype)]
    if upstream in ("lse", "both"):
        outputs, grads = [*outputs, lse], [*grads, dlse.to(lse.dtype)]
    leaves = [inputs[name] for name in ("q", "k", "v")]
    found = torch.autograd.grad(outputs, leaves, grads, materialize_grads=True)
    return {"o": o.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), found, strict=True))


def truth(inputs: dict[str, Any], upstream: str = "both") -> dict[str, torch.Tensor]:
    """The results in float64, by the definition."""
    doubled = {
        name: x.detach().double().requires_grad_() if name in ("q", "k", "v") else x for name, x in inputs.items()
    }
    return results(naive_window_attention, doubled, upstream)
