"""Times the attention over window and sinks, and its decoding step: `python -m measuring.kernels.window`.

Peers: FlexAttention with the same mask (compiled, block mask not timed), SDPA with the mask as a T x T tensor, and SDPA
over all earlier tokens. Each is first compared with the blocked PyTorch form in float64 on the first row and key head;
the last computes another function and is not compared. Steps run in a CUDA graph, beside the PyTorch form of the step.

    python -m measuring.kernels.window --sweep 64

times other tile sizes for heads of 64, of one kernel at a time, and prints the fastest. `--sweep step` does the same
for the decoding step. Neither writes a file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from deltanet_kernels import window_attention, window_step_
from deltanet_kernels.window import attention, step
from deltanet_kernels.window.calls import WindowCall, WindowStepCall
from deltanet_kernels.window.config import WindowConfig, step_heads, step_places, window_config
from deltanet_kernels.window.cpu import torch_window_attention
from deltanet_kernels.window.cpu_step import torch_window_step_
from measuring.kernels.timing import copy_bandwidth, graph_us, median_ms, peak_gib, write

SINKS = 4
Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Shape(NamedTuple):
    """Rows, tokens, query and key heads, head size, window."""

    B: int
    T: int
    HQ: int
    HK: int
    D: int
    window: int


SHAPES = [
    Shape(16, 2048, 9, 3, 64, 64),
    Shape(16, 2048, 9, 3, 64, 256),
    Shape(4, 4096, 32, 8, 64, 128),
    Shape(4, 4096, 32, 8, 128, 64),
    Shape(4, 4096, 32, 8, 128, 512),
    Shape(4, 4096, 4, 1, 256, 64),
    Shape(1, 32768, 32, 8, 128, 128),
    Shape(1, 32768, 32, 8, 128, 1024),
]
STEPS = [(B, window) for B in (1, 8, 64, 256) for window in (64, 256, 1024)]


def sees(window: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (j <= i) & ((i - j < window) | (j < SINKS))


def _heads_first(function: Callable[..., torch.Tensor], **options: Any) -> Attention:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options).transpose(1, 2)

    return call


def implementations(shape: Shape) -> dict[str, Callable[[], Attention]]:
    """Name -> what makes the implementation for this shape."""

    def flex() -> Attention:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # each window is a recompilation, and after eight of them PyTorch runs unfused operators
        mask = create_block_mask(lambda b, h, i, j: sees(shape.window, i, j), None, None, shape.T, shape.T)
        return _heads_first(torch.compile(flex_attention, dynamic=False), block_mask=mask)

    def masked() -> Attention:
        token = torch.arange(shape.T, device="cuda")
        mask = sees(shape.window, token[:, None], token[None])
        return _heads_first(scaled_dot_product_attention, attn_mask=mask)

    return {
        "deltanet": lambda: lambda q, k, v: window_attention(q, k, v, shape.window, SINKS)[0],
        "flex_attention": flex,
        "sdpa, mask": masked,
        "sdpa, all tokens": lambda: _heads_first(scaled_dot_product_attention, is_causal=True),
    }


def make(shape: Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v in bfloat16, heads before tokens in memory as in models, and a gradient of o."""
    torch.manual_seed(0)
    B, T, HQ, HK, D, _ = shape
    leaves = [torch.randn(B, n, T, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in (HQ, HK, HK)]
    return [x.requires_grad_() for x in leaves], torch.randn(B, T, HQ, D, device="cuda", dtype=torch.bfloat16)


def both(run: Attention, leaves: list[torch.Tensor], do: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of q, k and v."""
    o = run(leaves[0], leaves[1], leaves[2])
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def worst_error(found: list[torch.Tensor], shape: Shape, leaves: list[torch.Tensor], do: torch.Tensor) -> float:
    """The largest relative L2 error of o, dq, dk, dv in the first row and key head."""
    group = shape.HQ // shape.HK
    heads = (group, 1, 1)
    own = [x.detach()[:1, :, :n].double().requires_grad_() for x, n in zip(leaves, heads, strict=True)]
    o, _ = torch_window_attention(WindowCall(own[0], own[1], own[2], shape.window, SINKS))
    wanted = [o.detach(), *torch.autograd.grad(o, own, do[:1, :, :group].double())]
    pairs = zip(found, wanted, strict=True)
    return max(((x[:1, :, : y.shape[2]].double() - y).norm() / y.norm()).item() for x, y in pairs)


def measure(name: str, build: Callable[[], Attention], shape: Shape) -> dict[str, Any]:
    run, (leaves, do) = build(), make(shape)
    found: dict[str, Any] = {}
    if name != "sdpa, all tokens":
        found["rel_error"] = error = worst_error(both(run, leaves, do), shape, leaves, do)
        if not error < 2e-2:
            return found
    with torch.no_grad():
        found["fwd_ms"] = round(median_ms(lambda: run(leaves[0], leaves[1], leaves[2])), 4)
        try:
            found["fwd_graph_ms"] = round(graph_us(lambda: run(leaves[0], leaves[1], leaves[2])) / 1e3, 4)
        except RuntimeError as error:  # a peer that a CUDA graph cannot capture
            found["not_captured"] = repr(error)[:200]
    found["fwdbwd_ms"] = round(median_ms(lambda: both(run, leaves, do)), 4)
    found["peak_gib"] = round(peak_gib(lambda: both(run, leaves, do)), 3)
    return found


def measure_step(B: int, window: int, bandwidth: float) -> list[dict[str, Any]]:
    """Steps of 32 query and 8 key heads of 128, on several caches in turn, so that none stays in the L2 cache."""
    torch.manual_seed(0)
    HQ, HK, D, S = 32, 8, 128, window + SINKS
    q, far = (torch.randn(B, 1, HQ, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    logit = torch.randn(B, 1, HQ, device="cuda", dtype=torch.bfloat16)
    slopes = torch.ones(HQ, device="cuda"), torch.ones(HQ, device="cuda")
    k, v = (torch.randn(B, 1, HK, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    size = 4 * B * HK * S * D  # bytes of keys and values
    numbers = torch.arange(1, S + 1, device="cuda", dtype=torch.int32).repeat(B, 1)
    count = torch.full((B,), S, device="cuda", dtype=torch.int32)

    def cache(dtype: torch.dtype = torch.bfloat16) -> Cache:
        torch.manual_seed(1)
        keys, values = (torch.randn(B, HK, S, D, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
        return keys, values, numbers.clone(), count.clone()

    def call(form: Callable[..., torch.Tensor], kept: Cache) -> torch.Tensor:
        return form(q, k, v, window, SINKS, *kept, logit, far, *slopes)

    wide = q.double(), k.double(), v.double()
    wanted = torch_window_step_(
        WindowStepCall(*wide, window, SINKS, *cache(torch.float64), logit, far.double(), *slopes)
    )
    caches = [cache() for _ in range(max(1, min(64, 2**28 // size)))]
    rows = []
    for name, form in (
        ("deltanet", window_step_),
        ("PyTorch", lambda *arguments: torch_window_step_(WindowStepCall(*arguments))),
    ):
        error = ((call(form, cache()).double() - wanted).norm() / wanted.norm()).item()
        turns = itertools.cycle(caches)

        def run(form: Callable[..., torch.Tensor] = form, turns: Any = turns) -> torch.Tensor:
            return call(form, next(turns))

        row: dict[str, Any] = {"step": [B, HQ, HK, D, window], "impl": name, "rel_error": error}
        row["us"] = round(graph_us(run, 64), 3)
        row["share_of_copy_bandwidth"] = round(size / (row["us"] * 1e-6) / bandwidth, 3)
        rows.append(row)
    return rows


def sweep(D: int) -> None:
    """Print the times of the forward pass, or of both passes, with other sizes of one kernel."""
    for shape in (shape for shape in SHAPES if shape.D == D):
        leaves, do = make(shape)
        ours = implementations(shape)["deltanet"]()
        for kernel in ("forward", "gradients_q", "gradients_k"):
            own = window_config(kernel, D, SINKS, torch.bfloat16)
            found: list[tuple[float, float, WindowConfig]] = []
            for M, N, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
                sizes = WindowConfig(M, N, min(N, own.S), own.D, warps, stages)
                attention.window_config = functools.partial(_replaced, kernel, sizes)
                run: Callable[[], object] = functools.partial(torch.no_grad()(ours), *leaves)
                if kernel != "forward":
                    run = functools.partial(both, ours, leaves, do)
                try:
                    error = worst_error(both(ours, leaves, do), shape, leaves, do)
                    found.append((median_ms(run, 10), error, sizes))
                except Exception as failure:  # sizes that do not fit into a multiprocessor
                    print(kernel, sizes, repr(failure)[:80], flush=True)
            attention.window_config = window_config
            found.sort(key=lambda row: row[0])
            for ms, error, sizes in found[:6] + [row for row in found[6:] if row[2] == own]:
                pinned = " (pinned)" if sizes == own else ""
                print(f"{shape}, {kernel}, {sizes}: {ms:.4f} ms, error {error:.1e}{pinned}", flush=True)


def sweep_steps(bandwidth: float) -> None:
    """Print the times of decoding steps with other numbers of query heads per program and places per tile."""
    for B, window in STEPS:
        for heads, places in itertools.product((1, 2, 4), (16, 32, 64, 128)):
            step.step_heads = functools.partial(_constant, heads)
            step.step_places = functools.partial(_constant, places)
            row = measure_step(B, window, bandwidth)[0]
            print(f"heads {heads}, places {places}: {row}", flush=True)
    step.step_heads, step.step_places = step_heads, step_places


def _constant(value: int, *_: int) -> int:
    return value


def _replaced(which: str, sizes: WindowConfig, kernel: str, *rest: Any) -> WindowConfig:
    return sizes if kernel == which else window_config(kernel, *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", metavar="D", help="time other tile sizes for heads of D, or of the decoding step")
    parser.add_argument("--output", type=Path, help="folder of the result file; the package's own by default")
    args = parser.parse_args()
    if args.sweep == "step":
        sweep_steps(copy_bandwidth())
        return
    if args.sweep:
        sweep(int(args.sweep))
        return
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for name, build in implementations(shape).items():
            row: dict[str, Any] = {"shape": list(shape), "impl": name}
            try:
                row |= measure(name, build, shape)
            except Exception as error:
                row["failed"] = repr(error)[:200]
            rows.append(row)
            print(row, flush=True)
    bandwidth = copy_bandwidth()
    for B, window in STEPS:
        rows += (steps := measure_step(B, window, bandwidth))
        print(*steps, sep="\n", flush=True)
    notes = {
        "copy_bytes_per_s": bandwidth, "shape": f"B, T, HQ, HK, D, window; {SINKS} sinks, bfloat16",
        "step": "B, HQ, HK, D, window",
    }  # fmt: skip
    write("window_h200.json", rows, notes, args.output)


if __name__ == "__main__":
    main()
