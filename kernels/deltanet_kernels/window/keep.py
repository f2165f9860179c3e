"""The decoding cache of `window_step_` after a whole sequence, in one kernel.

    place p < sinks    token number p + 1
    place sinks + r    the last token number n <= T with n % window = r, if n > sinks

Places without a token hold zeros and the number 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.window.calls import WindowKeepCall

TILE = 2048  # elements per program


@triton.jit(do_not_specialize=["T"])
def keep_kernel(
    k, v, keys, values, numbers, count, length, T, HK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, BP: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and BP places; rows of k and v are X_ROW elements apart."""
    PLACES: tl.constexpr = WINDOW + SINKS
    TILES: tl.constexpr = (PLACES + BP - 1) // BP
    p = (tl.program_id(0) % TILES) * BP + tl.arange(0, BP)
    head = tl.program_id(0) // TILES % HK
    b = (tl.program_id(0) // TILES // HK).to(tl.int64)
    end = T if length is None else tl.load(length).to(tl.int32)
    last = end - (end + PLACES - p) % WINDOW  # end - (end - r) % WINDOW, r = p - SINKS, of a number not below 0
    n = tl.where(p < SINKS, p + 1, tl.where(last > SINKS, last, 0))
    n = tl.where(n <= end, n, 0)
    m_p = p < PLACES
    d = tl.arange(0, BD)
    m = m_p[:, None] & (d < D)[None, :]
    kept = m & (n > 0)[:, None]
    token = (b * T + n - 1)[:, None]
    own = (head * D + d)[None, :]
    to = ((b * HK + head) * PLACES + p)[:, None] * D + d[None, :]
    tl.store(keys + to, tl.load(k + token * K_ROW + own, mask=kept, other=0.0), mask=m)
    tl.store(values + to, tl.load(v + token * V_ROW + own, mask=kept, other=0.0), mask=m)
    if head == 0:
        tl.store(numbers + b * PLACES + p, n, mask=m_p)
        if tl.program_id(0) % TILES == 0:
            tl.store(count + b, end)


def _fake_window_keep(call: WindowKeepCall):
    k, places = call.k, call.window + call.sinks
    B, _, HK, D = k.shape
    numbers = k.new_empty((B, places), dtype=torch.int32)
    return *(x.new_empty((B, HK, places, D)) for x in (k, call.v)), numbers, numbers.new_empty((B,))


@operator(_fake_window_keep)
def window_keep_op(call: WindowKeepCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """keys and values [B, HK, window + sinks, D], numbers [B, window + sinks] int32, count [B] int32."""
    (B, T, HK, D), window, sinks = call.k.shape, call.window, call.sinks
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = _fake_window_keep(call)
    (k, k_row), (v, v_row) = rows(call.k), rows(call.v)
    BD = power_of_two(D, 1)
    BP = max(1, min(TILE // BD, power_of_two(window + sinks, 1)))
    launch(
        keep_kernel, B * HK * cdiv(window + sinks, BP), k, v, *cache, call.length, T,
        HK=HK, D=D, BD=BD, WINDOW=window, SINKS=sinks, BP=BP, K_ROW=k_row, V_ROW=v_row, num_warps=4,
    )  # fmt: skip
    return cache


def window_keep_triton(call: WindowKeepCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_keep` in Triton, for checked arguments."""
    return window_keep_op(call)
