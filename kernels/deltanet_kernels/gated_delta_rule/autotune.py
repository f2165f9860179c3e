"""Opt-in search for the configuration of the chunk kernels: DELTANET_AUTOTUNE=1.

The first call of each combination of head counts, head sizes and dtype times the pinned configuration and a few
variations of it, on inputs of its own, forward and backward. The fastest is used for the life of the process. Each
candidate compiles its kernels, some ten seconds in all, so the search is for chips without a pinned table. A candidate
counts only if it runs, agrees with the pinned configuration, and gives the same bits twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch

from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.config import ChunkConfig

TOLERANCE = 0.02  # relative difference of a result from the pinned configuration's: a few roundings of bfloat16

_chosen: dict[Hashable, ChunkConfig] = {}
_forced: list[ChunkConfig] = []


def enabled() -> bool:
    return os.environ.get("DELTANET_AUTOTUNE") == "1"


def candidates(config: ChunkConfig) -> list[ChunkConfig]:
    """The pinned configuration first, then one change at a time; never the tokens per chunk."""
    changes: list[dict[str, Any]] = [
        {"state_stages": 2, "grad_stages": 2},
        {"state_stages": 1, "grad_stages": 1},
        {"state_BV": max(config.state_BV // 2, 16), "grad_BV": max(config.grad_BV // 2, 16)},
        {"pair_registers": None if config.pair_registers else 168},
        {"pair_BV": max(config.pair_BV // 2, 16)},
        {"input_BV": max(config.input_BV // 2, 16)},
        {"input_BV": max(config.input_BV // 2, 16), "input_registers": 168},
    ]
    found = [config]
    for change in changes:
        other = replace(config, **change)
        # Four warps per 64 columns of the state, as in the pinned table.
        other = replace(other, state_warps=8 if other.state_BV > 64 else 4, grad_warps=8 if other.grad_BV > 64 else 4)
        if other not in found:
            found.append(other)
    return found


def fastest(configs: Iterable[ChunkConfig], measure: Callable[[ChunkConfig], float]) -> ChunkConfig:
    """The configuration with the smallest `measure`; the first one, whose errors are raised, if no other is smaller."""
    first, *others = configs
    best, least = first, measure(first)
    for config in others:
        try:
            time = measure(config)
        except Exception:  # too much shared memory or registers for this chip
            continue
        if time < least:
            best, least = config, time
    return best


def milliseconds(run: Callable[[], object]) -> float:
    """Median of five calls between CUDA events."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in events)[2]


def trial(
    HQ: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:  # fmt: skip
    """Output and gradients of inputs that fill an H200, by the registered operators, which ask `choose`."""
    generator = torch.Generator(device).manual_seed(0)
    T = 2048 if device.type == "cuda" else 8
    B = cdiv(128, HV) if device.type == "cuda" else 1
    q, k, v, do = (
        torch.randn(B, T, *heads, generator=generator, device=device).to(dtype)
        for heads in ((HQ, K), (H, K), (HV, V), (max(HQ, HV), V))
    )
    g, beta = (torch.rand(B, T, HV, generator=generator, device=device) for _ in range(2))
    inputs, scale = (q, k, v, -g, beta), K**-0.5
    forward, backward = torch.ops.deltanet.chunk_forward, torch.ops.deltanet.chunk_backward
    o, _, *kept = forward(*inputs, None, None, None, None, scale, True, False, False, True, "auto", 1)
    grads = backward(do, None, *inputs, None, None, None, *kept, scale, True, False, False, "auto", 1)
    return [o, *grads[:5]]


def choose(
    key: Hashable,
    pinned: ChunkConfig,
    run: Callable[[], list[torch.Tensor]],
    clock: Callable[[Callable[[], object]], float],
) -> ChunkConfig:
    """The configuration for `key`: the one being tried, the one found before, or the outcome of a search now.

    `run` calls the operators, which call this function for their configuration; `clock` times a call. Under graph
    capture nothing can be timed and the pinned configuration is used.
    """
    if _forced:
        return _forced[-1]
    if key not in _chosen:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return pinned
        wanted: list[torch.Tensor] = []

        def measure(config: ChunkConfig) -> float:
            _forced.append(config)
            try:
                first, second = run(), run()
                if not wanted:
                    wanted.extend(first)
                if not _agree(first, second, wanted):
                    return float("inf")
                return clock(run)
            finally:
                _forced.pop()

        _chosen[key] = fastest(candidates(pinned), measure)
    return _chosen[key]


def _agree(first: list[torch.Tensor], second: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """`first` and `second` are equal bit for bit, and `wanted` within the tolerance; NaN never agrees."""
    if not all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
        return False
    return all(
        bool((x.float() - y.float()).norm() <= TOLERANCE * y.float().norm())
        for x, y in zip(first, wanted, strict=True)
    )  # fmt: skip
