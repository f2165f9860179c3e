"""Chunked gated delta rule, first stage: row factors, scores P, and L.

`erase` changes L and the factor that the state is read with (row_factors.py); where L = 0, none is stored. With the L2
norm in the operator, P and L include the norms of both sides, so that raw q and k multiply them later. All are computed
once for all chunks in parallel. The later stages read them from memory (P is [C, C] per chunk and output head, as large
as T), which keeps exponentials, norms and that product out of their loops over chunks. L, in float32, is read by
solve.py alone; its product is computed here because the complete tile of keys is here.

Where sequences are cut into segments, the bounds [chunks, HV] are written too: the sum over the chunk's tokens of
g + max(0, log |1 - beta |k|^2|), and minus infinity if the chunk has a closed gate (segments.py). Other forms of the
erase term sum the logarithms of another gain: max(e^g, |e^g - beta |k|^2|) if the prediction is undecayed, and e^g
without erasing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.sizes import power_of_two
from deltanet_kernels.common.tiles import load_tile, softplus
from deltanet_kernels.gated_delta_rule.row_factors import (
    ChunkInputs,
    decay_between,
    decay_to,
    empty_scores,
    erase_flags,
    row_norm_factor,
)


@triton.jit
def _gates(g, beta, A_log, dt_bias, at, live, head, GATE: tl.constexpr, SIGMOID: tl.constexpr):
    """Log decay, closed gates and write strength of a chunk's tokens, zero past the end."""
    x = tl.load(g + at, mask=live, other=0.0).to(tl.float32)
    if GATE:
        x = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x + tl.load(dt_bias + head).to(tl.float32))
    b = tl.load(beta + at, mask=live, other=0.0).to(tl.float32)
    if SIGMOID:
        b = 1.0 / (1.0 + tl.exp(-b))
    closed = live & (x < -100.0)
    return tl.where(live & (x >= -100.0), x, 0.0), tl.where(closed, 1.0, 0.0), tl.where(live, b, 0.0)


@triton.jit(do_not_specialize=["T"])
def scores_kernel(
    q, k, g, beta, A_log, dt_bias, factors, P_out, L_out, bounds, cu_seqlens, row_of_chunk, first_chunk,
    scale, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr,
    BOUND: tl.constexpr, READ: tl.constexpr, UNDECAYED: tl.constexpr, SCORES: tl.constexpr, VARLEN: tl.constexpr,
    FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute P, L, the row factors and the bound; one program per (chunk, output head)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    pid = tl.program_id(0)
    out = pid % HO
    c = pid // HO
    head = out // (HO // HV)
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    live = i < valid
    mK = live[:, None] & (d < K)[None, :]
    if SCORES:
        q_base = q + row * q_row + (out // (HO // HQ)).to(tl.int64) * q_head + first * q_token
    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
    if SCORES:
        q_tile = load_tile(q_base + (i[:, None] * q_token + d[None, :]), mK, FULL)
    k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
    log_decay, closed, b = _gates(g, beta, A_log, dt_bias, (flat + i) * HV + head, live, head, GATE, SIGMOID)
    G = tl.cumsum(log_decay, axis=0)
    s = tl.cumsum(closed, axis=0)
    s_last = tl.max(s, axis=0)
    G_last = tl.sum(tl.where(i == C - 1, G, 0.0), axis=0)
    gamma = tl.where(s > 0.0, 0.0, tl.exp(G))
    f = tl.zeros([C], dtype=tl.float32) + 1.0
    r = tl.zeros([C], dtype=tl.float32) + 1.0
    if NORM:
        if SCORES:
            f = row_norm_factor(q_tile)
        r = row_norm_factor(k_tile)
    gamma_erase = gamma
    if UNDECAYED:
        # Summed again, one token later: G - g would lose digits beside a strong gate.
        before = live & (i > 0)
        log_before, closed_before, _ = _gates(
            g, beta, A_log, dt_bias, (flat + i - 1) * HV + head, before, head, GATE, SIGMOID
        )  # fmt: skip
        G_before = tl.cumsum(log_before, axis=0)
        s_before = tl.cumsum(closed_before, axis=0)
        gamma_erase = tl.where(s_before > 0.0, 0.0, tl.exp(G_before))
    plane = tl.full([], HV, tl.int64) * tokens
    if out % (HO // HV) == 0:
        at = head.to(tl.int64) * tokens + flat
        rows = factors + at
        packed = factors + (2 * plane + 4 * at)
        tl.store(rows + i, G, mask=live)
        tl.store(rows + plane + i, s, mask=live)
        tl.store(packed + 4 * i, b, mask=live)
        tl.store(packed + 4 * i + 1, -gamma_erase * b * r, mask=live)
        tl.store(packed + 4 * i + 2, tl.where(s == s_last, tl.exp(tl.minimum(G_last - G, 0.0)), 0.0) * r, mask=live)
        tl.store(packed + 4 * i + 3, r, mask=live)
        if BOUND:
            at_bound = bounds + c.to(tl.int64) * HV + head
            wide = k_tile.to(tl.float32)
            if UNDECAYED:
                lengths = r * r * tl.sum(wide * wide, axis=1)
                faded = tl.where(closed > 0.0, 0.0, tl.exp(log_decay))
                gain = tl.maximum(faded, tl.abs(faded - b * lengths))
                log_gain = tl.where(gain > 0.0, tl.log(tl.maximum(gain, 1e-38)), -float("inf"))
                tl.store(at_bound, tl.sum(log_gain, axis=0))
            else:
                bound = G_last
                if READ:
                    longer = tl.log(tl.abs(1.0 - b * r * r * tl.sum(wide * wide, axis=1)))
                    bound = G_last + tl.sum(tl.where(longer <= 0.0, 0.0, longer), axis=0)
                tl.store(at_bound, tl.where(s_last > 0.0, -float("inf"), bound))
    if SCORES:
        reads = factors + (6 * plane + 4 * (out.to(tl.int64) * tokens + flat))
        tl.store(reads + 4 * i, f, mask=live)
        tl.store(reads + 4 * i + 1, f * scale * gamma, mask=live)
    if PRECISION == "tf32":
        G -= 128.0 * s
        s = tl.zeros_like(s)
        if UNDECAYED:
            G_before -= 128.0 * s_before
            s_before = tl.zeros_like(s_before)
    if SCORES:
        P = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    D = decay_between(G, s, i[:, None] >= i[None, :]) * r[None, :]
    square = i[:, None] * C + i[None, :]
    if SCORES:
        P *= D * (f * scale)[:, None]
        tl.store(P_out + (c.to(tl.int64) * HO + out) * (C * C) + square, P.to(P_out.dtype.element_ty))
    if READ:  # noqa: SIM102 (known when compiling; the next is not)
        if out % (HO // HV) == 0:
            if UNDECAYED:
                # Rows past the end have no G before them; without the mask theirs may be infinite.
                earlier = live[:, None] & (i[:, None] > i[None, :])
                D = decay_to(G_before, s_before, G, s, earlier) * r[None, :]
            L = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
            L = tl.where(i[:, None] > i[None, :], L * D * (b * r)[:, None], 0.0)
            tl.store(L_out + (c.to(tl.int64) * HV + head) * (C * C) + square, L)


def scores(
    inputs: ChunkInputs, full: bool, precision: str, num_warps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """P [chunks, HO, C, C], L [chunks, HV, C, C] in float32, the row factors, and the bounds (None unless requested).

    L is empty where it is 0, P without scores. Reads q [B, T, HQ, K], k [B, T, H, K] (unit stride along K) and
    contiguous g, beta [B, T, HV].
    """
    q, k, g, beta, A_log, dt_bias, chunks, scale, sigmoid, norm, bound, erase, with_scores = inputs
    (B, T, _, K), HV = k.shape, g.shape[2]
    HQ = q.shape[2] if with_scores else HV
    P, factors, bounds = empty_scores(inputs)
    flags = erase_flags(erase)
    square = (chunks.count, HV, chunks.size, chunks.size) if flags["READ"] else (0,)
    L = k.new_empty(square, dtype=torch.float32)
    if chunks.count:
        launch(
            scores_kernel, chunks.count * max(HQ, HV),
            q, k, g, beta, A_log, dt_bias, factors, P, L, bounds, chunks.cu_seqlens, chunks.row_of_chunk,
            chunks.first_chunk, scale, T, B * T, *q.stride()[:3], *k.stride()[:3], H=k.shape[2], HV=HV, HQ=HQ, K=K,
            BK=power_of_two(K), C=chunks.size, GATE=A_log is not None, SIGMOID=sigmoid, NORM=norm, BOUND=bound,
            **flags, SCORES=with_scores, VARLEN=chunks.varlen, FULL=full, PRECISION=precision, num_warps=num_warps,
        )  # fmt: skip
    return P, L, factors, bounds
