"""Chunked gated delta rule on CUDA: the launches, their registration with PyTorch, and the entry point.

Forward: scores.py and solve.py, or hopper/solve.py for both, then states.py. Backward: query_sums.py where query heads
share states, states_backward.py, then gradients_pairs.py and gradients_inputs.py, or gradients_64.py or
hopper/gradients_128.py for both. The kernels in hopper/ have the default form of the erase term only, gradients_64.py
those without erase key and mini-batches. The other forms leave out what they do not have, and gradients_erase_key.py
adds the gradient of an erase key. The package docstring says which kernel serves which call and defines the symbols.
`Kept` lists what the forward pass keeps for the backward pass.

Short names in this file: Tm is T, h the states S [chunks, HV, V, K], vn the values V', dh and dw the gradients of S and
W, ht and dht the final state and its gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.device import capability, multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import Operator, differentiable, gradient, operator
from deltanet_kernels.common.sequences import Chunks, cut_chunks
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule import autotune
from deltanet_kernels.gated_delta_rule.config import (
    MIN_HALF_SIZE,
    ChunkConfig,
    check_supported,
    chunk_config,
    product_precision,
    slices,
    summed_stages,
    tile_width,
)
from deltanet_kernels.gated_delta_rule.gradients_64 import joint_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_erase_key import erase_key_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_inputs import input_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_pairs import pair_gradients_kernel
from deltanet_kernels.gated_delta_rule.hopper import select as hopper
from deltanet_kernels.gated_delta_rule.query_sums import query_sums_kernel
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs, ChunkTensors, erase_flags
from deltanet_kernels.gated_delta_rule.scores import scores
from deltanet_kernels.gated_delta_rule.segments import chunk_spans, compose, composes, segments_for
from deltanet_kernels.gated_delta_rule.solve import invert
from deltanet_kernels.gated_delta_rule.states import outputs_kernel, states_kernel
from deltanet_kernels.gated_delta_rule.states_backward import states_backward_kernel


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which V' and dW are stored: float32 for float16, which would lose small gradients."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pinned(k: torch.Tensor, v: torch.Tensor, minibatch: int = 0) -> ChunkConfig:
    """The configuration; with mini-batches a chunk is one of them."""
    config = chunk_config(k.shape[3], v.shape[3], k.dtype, capability(k.device))
    return replace(config, C=minibatch) if minibatch else config


def _config(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, minibatch: int) -> ChunkConfig:
    pinned = _pinned(k, v, minibatch)
    if minibatch or not autotune.enabled():
        return pinned
    (H, K), (HV, V), HQ = k.shape[2:], v.shape[2:], q.shape[2]
    key = (HQ, H, HV, K, V, k.dtype, k.device)
    return autotune.choose(key, pinned, lambda: _trial(HQ, H, HV, K, V, k.dtype, k.device), autotune.milliseconds)


def _trial(HQ: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Output and gradients of inputs that fill an H200, for the search of a configuration."""
    generator = torch.Generator(device).manual_seed(0)
    T = 2048 if device.type == "cuda" else 8
    B = cdiv(128, HV) if device.type == "cuda" else 1
    q, k, v, do = (
        torch.randn(B, T, *heads, generator=generator, device=device).to(dtype)
        for heads in ((HQ, K), (H, K), (HV, V), (max(HQ, HV), V))
    )
    g, beta = (torch.rand(B, T, HV, generator=generator, device=device) for _ in range(2))
    o, _, *kept = chunk_forward(
        q, k, v, -g, beta, None, None, None, None, K**-0.5, True, False, False, True, "auto", 1
    )  # fmt: skip
    grads = chunk_backward(do, None, q, k, v, -g, beta, None, None, None, *kept, K**-0.5, True, False, False, "auto", 1)
    return [o, *grads[:5]]


def _sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    K, V = k.shape[3], v.shape[3]
    BK = tile_width(K, k.dtype)
    return {"H": k.shape[2], "HV": v.shape[2], "HQ": q.shape[2], "K": K, "V": V, "BK": BK}


def _full(k: torch.Tensor, v: torch.Tensor, chunks: Chunks) -> bool:
    """Whether every tile of every kernel is full, so that no mask is applied."""
    sizes = (k.shape[3], v.shape[3])
    even = all(size == tile_width(size, k.dtype) for size in sizes)
    return even and not chunks.varlen and chunks.tokens % chunks.size == 0


def joins_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ChunkConfig) -> bool:
    """Whether one kernel (gradients_64.py) computes all gradients within a chunk instead of two."""
    widths = {tile_width(size, k.dtype) for size in (k.shape[3], v.shape[3])}
    return q.shape[2] == k.shape[2] == v.shape[2] and widths == {config.joint_size}


def _default(erase: str, erase_key: torch.Tensor | None) -> bool:
    """Whether this is the gated delta rule itself, which the kernels for two stages compute."""
    return erase == "decayed" and erase_key is None


def _scores_and_inverse(inputs: ChunkInputs, config: ChunkConfig, full: bool, precision: str) -> ChunkTensors:
    """The tensors of every chunk by the Triton kernels; L, as large as two of T, is freed on return."""
    P, L, factors, bounds = scores(inputs, full, precision, config.score_warps)
    if not erase_flags(inputs.erase, inputs.erase_key)["SOLVE"]:
        return ChunkTensors(P, None, factors, bounds)
    T = invert(L, inputs.k.dtype, inputs.q.shape[1], inputs.chunks, precision, config.solve_warps)
    return ChunkTensors(P, T, factors, bounds)


def _stages(stages: int, erase_key: torch.Tensor | None) -> int:
    """Pipeline stages of a state kernel; an erase key takes more shared memory."""
    return max(1, stages - (erase_key is not None))


def _zero_tail(chunks: Chunks, *tensors: torch.Tensor) -> None:
    """Tokens after the last packed sequence get zeros."""
    if chunks.cu_seqlens is not None:
        end = chunks.cu_seqlens[-1]
        for x in tensors:
            tail = torch.arange(x.shape[1], device=x.device) >= end
            x.masked_fill_(tail.view(1, -1, *[1] * (x.dim() - 2)), 0)


def _fake_chunk_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale, norm, sigmoid, final, keep, precision, segments,
    erase_key=None, erase="decayed", minibatch=0,
):  # fmt: skip
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    C = _pinned(k, v, minibatch).C
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = B * ((T + C - 1) // C) if cu_seqlens is None else (T + C - 1) // C + rows
    kept = _kept_dtype(k.dtype)
    return (
        q.new_empty(B, T, max(HQ, HV), V),
        q.new_empty((rows, HV, K, V) if final else (0,), dtype=torch.float32),
        q.new_empty((6 * HV + 4 * max(HQ, HV), B * T) if keep else (0,), dtype=torch.float32),
        k.new_empty((count, HV, C, C) if keep and erase_flags(erase, erase_key)["SOLVE"] else (0,)),
        k.new_empty((count, max(HQ, HV), C, C) if keep else (0,)),
        k.new_empty((count, HV, V, K) if keep else (0,), dtype=kept),
        k.new_empty((B, T, HV, V) if keep else (0,), dtype=kept),
        q.new_empty((rows, segments, HV, K, K) if keep and composes(segments, K) else (0,), dtype=torch.float32),
        q.new_empty((rows, HV, segments, 5, 2) if keep and segments > 1 else (0,), dtype=torch.int32),
    )


class Kept(NamedTuple):
    """The results of `chunk_forward` after the output and the final state, which the backward pass reads."""

    factors: torch.Tensor
    """Row factors [6 HV + 4 HO, B*T], float32."""
    T: torch.Tensor
    """(I + L)^-1 [chunks, HV, C, C]; empty if L is 0."""
    P: torch.Tensor
    """Scores [chunks, HO, C, C]."""
    S: torch.Tensor
    """State entering each chunk, transposed [chunks, HV, V, K]."""
    values: torch.Tensor
    """V' [B, T, HV, V]."""
    M: torch.Tensor
    """Linear maps of composed segments [rows, segments, HV, K, K], float32."""
    spans: torch.Tensor
    """Chunks that each pass processes per segment [rows, HV, segments, 5, 2], int32 (segments.py)."""


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    scale: float, norm: bool, sigmoid: bool, final: bool, keep: bool, precision: str, segments: int,
    erase_key: torch.Tensor | None = None, erase: str = "decayed", minibatch: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """As `chunk_forward`, with None for what is empty."""
    precision = product_precision(precision, q.dtype)
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    g, beta = g.contiguous(), beta.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    erase_key = None if erase_key is None else erase_key.contiguous()
    form = erase_flags(erase, erase_key)
    config, sizes = _config(q, k, v, minibatch), _sizes(q, k, v)
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    C, HO = config.C, max(HQ, HV)
    chunks = cut_chunks(B, T, C, cu_seqlens)
    full = _full(k, v, chunks)
    chunk_inputs = ChunkInputs(
        q, k, g, beta, A_log, dt_bias, chunks, scale, sigmoid, norm, segments > 1, erase_key, erase
    )  # fmt: skip
    if _default(erase, erase_key) and hopper.serves_solve(q, k, config, full, precision):
        P, Tm, factors, bounds = hopper.solve(chunk_inputs)
    else:
        P, Tm, factors, bounds = _scores_and_inverse(chunk_inputs, config, full, precision)

    o = q.new_empty(B, T, HO, V)
    ht = q.new_empty(chunks.rows, HV, K, V, dtype=torch.float32) if final else None
    fused = HQ <= HV
    stored = keep or not fused
    h = k.new_empty(chunks.count, HV, V, K, dtype=_kept_dtype(k.dtype)) if stored else None
    vn = k.new_empty(B, T, HV, V, dtype=_kept_dtype(k.dtype)) if stored else None
    composed = composes(segments, K)
    M = None
    if segments > 1:  # the kernel that could write M is compiled with it, composed or not
        M = q.new_empty((chunks.rows, segments, HV, K, K) if composed else (0,), dtype=torch.float32)
    inputs = (q, k, erase_key, v, factors, Tm, P)
    where = (chunks.cu_seqlens, chunks.first_chunk, T, B * T)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    flags = {"C": C, "VARLEN": chunks.varlen, "FULL": full, "PRECISION": precision}
    programs = chunks.rows * segments * HV
    BV, warps = slices(config.state_BV, config.state_warps, V, chunks.rows * HV, multiprocessors(q.device))
    common = {
        **sizes, **flags, "BV": BV, "SEGMENTS": segments, "COMPOSED": composed,
        "STAGES": _stages(config.state_stages, erase_key),
        "num_warps": warps, **{name: form[name] for name in ("READ", "SOLVE", "OWN")},
    }  # fmt: skip
    start, table = initial_state, None
    if segments > 1:
        assert bounds is not None
        table = chunk_spans(bounds, chunks, segments, composed)
        start = q.new_empty(chunks.rows, segments, HV, K, V, dtype=torch.float32)
        launch(
            states_kernel, programs * (cdiv(V, BV) + (cdiv(K, BV) if composed else 0)),
            *inputs, None, o, h, vn, start, M, table, *where, *strides, **common,
            INITIAL=False, FINAL=True, OUTPUT=False, KEEP=False, TRANSITION=True,
        )  # fmt: skip
        compose(M if composed else None, start, initial_state, table, False, precision)
    launch(
        states_kernel, programs * cdiv(V, BV),
        *inputs, start, o, h, vn, ht, M, table, *where, *strides, **common,
        INITIAL=start is not None, FINAL=final, OUTPUT=fused, KEEP=stored, TRANSITION=False,
    )  # fmt: skip
    if not fused and chunks.count:
        launch(
            outputs_kernel, chunks.count * HO * cdiv(V, config.output_BV),
            q, factors, P, h, vn, o, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, B * T,
            *strides[:3], HV=HV, HQ=HQ, K=K, V=V, BK=sizes["BK"], **flags, BV=config.output_BV,
            num_warps=config.output_warps,
        )  # fmt: skip
    _zero_tail(chunks, o)
    return o, ht, *((factors, Tm, P, h, vn, M, table) if keep else (None,) * 7)


@operator(_fake_chunk_forward)
def chunk_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    scale: float, norm: bool, sigmoid: bool, final: bool, keep: bool, precision: str, segments: int,
    erase_key: torch.Tensor | None = None, erase: str = "decayed", minibatch: int = 0,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor,
]:  # fmt: skip
    """o, the final state (empty unless `final`), and the fields of `Kept` (empty unless `keep`)."""
    o, ht, *kept = _forward(
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale, norm, sigmoid, final, keep, precision,
        segments, erase_key, erase, minibatch,
    )  # fmt: skip
    wide = _kept_dtype(k.dtype)
    dtypes = (torch.float32, k.dtype, k.dtype, wide, wide, torch.float32, torch.int32)
    kept = [q.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(kept, dtypes, strict=True)]
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht, *Kept(*kept)


def _fake_chunk_backward(
    do, dht, q, k, v, g, beta, cu_seqlens, A_log, dt_bias, factors, Tm, P, h, vn, M, table,
    scale, norm, sigmoid, initial, precision, segments, erase_key=None, erase="decayed", minibatch=0,
):  # fmt: skip
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (rows, v.shape[2], k.shape[3], v.shape[3]) if initial else (0,)
    dA = q.new_empty(0, dtype=torch.float32) if A_log is None else torch.empty_like(A_log)
    dbias = q.new_empty(0, dtype=torch.float32) if dt_bias is None else torch.empty_like(dt_bias)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)]
    dkey = q.new_empty((0,) if erase_key is None else erase_key.shape)
    return (*grads, q.new_empty(state, dtype=torch.float32), dA, dbias, dkey)


def _query_sums(q, factors, P, do, chunks: Chunks, HV: int, BK: int, config: ChunkConfig, flags):
    """A [chunks, HV, V, C] and R [chunks, HV, V, K] of query_sums.py; None where no query heads share a state."""
    (HQ, K), V, C = q.shape[2:], do.shape[3], config.C
    if HQ <= HV or not chunks.count:
        return None, None
    A, R = (q.new_empty(chunks.count, HV, V, size, dtype=torch.float32) for size in (C, K))
    BV = config.pair_BV
    launch(
        query_sums_kernel, chunks.count * HV * cdiv(V, BV),
        q, factors, P, do, A, R, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, q.shape[1],
        q.shape[0] * q.shape[1], *q.stride()[:3], *do.stride()[:3], HV=HV, HQ=HQ, K=K, V=V, BK=BK, BV=BV, **flags,
        num_warps=config.pair_warps, num_stages=1,
    )  # fmt: skip
    return A, R


@operator(_fake_chunk_backward)
def chunk_backward(
    do: torch.Tensor, dht: torch.Tensor | None,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    factors: torch.Tensor, Tm: torch.Tensor, P: torch.Tensor, h: torch.Tensor, vn: torch.Tensor, M: torch.Tensor,
    table: torch.Tensor,
    scale: float, norm: bool, sigmoid: bool, initial: bool, precision: str, segments: int,
    erase_key: torch.Tensor | None = None, erase: str = "decayed", minibatch: int = 0,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor,
]:  # fmt: skip
    """Gradients of q, k, v, g, beta, the initial state, A_log, dt_bias and the erase key; empty for absent inputs."""
    precision = product_precision(precision, q.dtype)
    q, k, v, do, g = _unit_stride(q), _unit_stride(k), _unit_stride(v), _unit_stride(do), g.contiguous()
    dht = None if dht is None else dht.contiguous()
    erase_key = None if erase_key is None else erase_key.contiguous()
    form = erase_flags(erase, erase_key)
    config, sizes = _config(q, k, v, minibatch), _sizes(q, k, v)
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    chunks = cut_chunks(B, T, config.C, cu_seqlens)
    dh, dw = torch.empty_like(h), torch.empty_like(vn)
    dh0 = q.new_empty((chunks.rows, HV, K, V) if initial else (0,), dtype=torch.float32)
    where = (chunks.cu_seqlens, chunks.first_chunk, T, B * T)
    q_strides, k_strides, o_strides = q.stride()[:3], k.stride()[:3], do.stride()[:3]
    full = _full(k, v, chunks)
    flags = {"C": config.C, "VARLEN": chunks.varlen, "FULL": full, "PRECISION": precision}
    programs = chunks.rows * segments * HV
    BV, warps = slices(config.grad_BV, config.grad_warps, V, chunks.rows * HV, multiprocessors(q.device))
    programs *= cdiv(V, BV)
    stages = config.grad_stages if HQ <= HV else summed_stages(config, sizes["BK"], BV, k.element_size())
    common = {
        **sizes, **flags, "BV": BV, "SEGMENTS": segments, "num_warps": warps,
        "STAGES": _stages(stages, erase_key),
        **{name: form[name] for name in ("READ", "SOLVE", "OWN")},
    }  # fmt: skip
    A, R = _query_sums(q, factors, P, do, chunks, HV, sizes["BK"], config, flags)
    inputs = (q, k, erase_key, factors, Tm, P, do, A, R)
    strides = (*q_strides, *k_strides, *o_strides)
    start = dht
    if segments > 1:
        start = q.new_empty(chunks.rows, segments, HV, K, V, dtype=torch.float32)
        launch(
            states_backward_kernel, programs,
            *inputs, None, dh, dw, start, table, *where, *strides, **common, FINAL=False, INITIAL=True, KEEP=False,
        )  # fmt: skip
        compose(M if M.numel() else None, start, dht, table, True, precision)
    launch(
        states_backward_kernel, programs,
        *inputs, start, dh, dw, dh0, table, *where, *strides, **common,
        FINAL=start is not None, INITIAL=initial, KEEP=True,
    )  # fmt: skip
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dg, dbeta = torch.empty_like(g), torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    gate = A_log is not None
    dkey = q.new_empty((0,) if erase_key is None else erase_key.shape)
    sums = q.new_zeros((chunks.count, HV, 2) if gate else (0,), dtype=torch.float32)
    if chunks.count and _default(erase, erase_key) and hopper.serves_gradients(q, k, do, config, full, precision):
        hopper.gradients(
            q, k, v, factors, P, do, h, dh, vn, dw, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, sums,
            scale, norm, sigmoid,
        )  # fmt: skip
    elif chunks.count:
        chunk_of = (chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk)
        Z, E = torch.empty_like(P), torch.empty_like(Tm)
        if erase_key is None and not minibatch and joins_gradients(q, k, v, config):
            launch(
                joint_gradients_kernel, chunks.count * HV,
                q, k, v, factors, P, do, h, dh, vn, dw, Z, E, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, sums, *chunk_of,
                scale, T, B * T, *strides, *v.stride()[:3], H=HV, K=K, V=V, BK=sizes["BK"], BV=tile_width(V, v.dtype),
                **flags, NORM=norm, GATE=gate, SIGMOID=sigmoid, READ=form["READ"], UNDECAYED=form["UNDECAYED"],
                num_warps=4, num_stages=1, maxnreg=255,
            )  # fmt: skip
        else:
            dG = q.new_empty(HV, B * T, dtype=torch.float32)
            launch(
                pair_gradients_kernel, chunks.count * HV,
                k, erase_key, v, factors, P, do, h, vn, dw, Z, E, dG, dv, dbeta, *chunk_of, scale, T, B * T,
                *k_strides, *o_strides, *v.stride()[:3], **sizes, **flags, **form, BV=config.pair_BV, SIGMOID=sigmoid,
                num_warps=config.pair_warps, num_stages=1, maxnreg=config.pair_registers,
            )  # fmt: skip
            if erase_key is not None:
                launch(
                    erase_key_gradients_kernel, chunks.count * k.shape[2],
                    k, erase_key, factors, h, dw, E, dG, dkey, *chunk_of, T, B * T, *k_strides, H=k.shape[2], HV=HV,
                    K=K, V=V, BK=sizes["BK"], **flags, BV=config.input_BV, SOLVE=form["SOLVE"],
                    UNDECAYED=form["UNDECAYED"], num_warps=config.input_warps, num_stages=1,
                    maxnreg=config.input_registers,
                )  # fmt: skip
            launch(
                input_gradients_kernel, chunks.count * k.shape[2],
                q, k, erase_key, factors, do, h, dh, vn, dw, Z, E, dG, g, A_log, dt_bias, dq, dk, dg, sums, *chunk_of,
                T, B * T, *strides, **sizes, **flags, **form, NORM=norm, BV=config.input_BV, GATE=gate,
                num_warps=config.input_warps, num_stages=1, maxnreg=config.input_registers,
            )  # fmt: skip
    _zero_tail(chunks, dq, dk, dv, dg, dbeta, *([] if erase_key is None else [dkey]))
    total = sums.sum(0) if gate else sums.view(0, 2)
    dA, dbias = (
        total[:, j].to(torch.float32 if x is None else x.dtype, copy=True) for j, x in enumerate((A_log, dt_bias))
    )
    return dq, dk, dv, dg, dbeta, dh0, dA, dbias, dkey


def _setup_context(ctx, inputs, output):
    (
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale, norm, sigmoid, final, _, precision,
        segments, erase_key, erase, minibatch,
    ) = inputs  # fmt: skip
    ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, A_log, dt_bias, *Kept(*output[2:]), erase_key)
    ctx.options = (scale, norm, sigmoid, initial_state is not None, precision, segments)
    ctx.form = (erase, minibatch)
    ctx.final = final
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dht, *_):
    q, k, v, g, beta, cu_seqlens, A_log, dt_bias, *kept, erase_key = ctx.saved_tensors
    if do is None:
        do = q.new_zeros(q.shape[0], q.shape[1], max(q.shape[2], v.shape[2]), v.shape[3])
    dq, dk, dv, dg, dbeta, dh0, dA, dbias, dkey = chunk_backward(
        do, dht if ctx.final else None, q, k, v, g, beta, cu_seqlens, A_log, dt_bias,
        *Kept(*kept), *ctx.options, erase_key, *ctx.form,
    )  # fmt: skip
    gate, initial = A_log is not None, ctx.options[3]
    return (
        dq, dk, dv, dg, dbeta, dh0 if initial else None, None, dA if gate else None, dbias if gate else None,
        *[None] * 7, None if erase_key is None else dkey, None, None,
    )  # fmt: skip


gradient("chunk_forward", _backward, _setup_context)
_chunk = differentiable(chunk_forward, _backward, _setup_context)
_chunk_without_gradients = Operator(_forward, chunk_forward.op)


def _chunk_lengths(config: ChunkConfig) -> list[int]:
    """The mini-batches that are chunks of the kernels: tiles of tensor cores, in no more memory than usual."""
    return [C for C in (16, 32, 64) if C <= config.C]


def _segments(q: torch.Tensor, v: torch.Tensor, rows: int, config: ChunkConfig) -> int:
    programs = rows * v.shape[2] * cdiv(v.shape[3], min(config.state_BV, 64))
    return segments_for(programs, q.shape[0] * q.shape[1] // (rows * config.C), multiprocessors(q.device))


def chunk_gated_delta_rule_triton(
    call: RuleCall, segments: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.chunk_gated_delta_rule` in Triton, for checked arguments.

    Float32 inputs are multiplied as `torch.set_float32_matmul_precision` says ("highest": IEEE float32); so are heads
    smaller than 16, in every dtype. Runs on the current stream, never waits for the device, and gives the same bits
    every time.

    Args:
        call: the arguments.
        segments: the number of segments per sequence (segments.py), chosen from the sizes by default.

    Returns:
        o [B, T, HO, V] in the dtype of v, and the final state [N, HV, K, V] float32 or None.

    Raises:
        NotImplementedError: head sizes over 256, dtypes other than float32, bfloat16, float16, or mini-batches of
            a number of tokens other than 16, 32 and, in 16-bit dtypes, 64.
    """
    q, k, v, erase_key = call.q, call.k, call.v, call.erase_key
    check_supported(q.dtype, q.shape[3], v.shape[3])
    dtype = v.dtype
    if min(q.shape[3], v.shape[3]) < MIN_HALF_SIZE:
        q, k, v = q.float(), k.float(), v.float()
        erase_key = None if erase_key is None else erase_key.float()
    rows = q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    pinned = _pinned(k, v)
    if call.minibatch is not None and call.minibatch not in _chunk_lengths(pinned):
        raise NotImplementedError(f"mini-batches of {call.minibatch} tokens: the kernels have {_chunk_lengths(pinned)}")
    if segments is None:
        segments = 1 if call.minibatch is not None else _segments(q, v, rows, pinned)
    gate, keep = call.use_gate_in_kernel, call.needs_gradients()
    o, ht, *_ = (_chunk if keep else _chunk_without_gradients)(
        q, k, v, call.g, call.beta, call.initial_state, call.cu_seqlens,
        call.A_log if gate else None, call.dt_bias if gate else None, call.factor, call.use_qk_l2norm_in_kernel,
        call.use_beta_sigmoid_in_kernel, call.output_final_state, keep, "auto", segments,
        erase_key, call.erase, call.minibatch or 0,
    )  # fmt: skip
    return o.to(dtype), ht if call.output_final_state else None
