"""Argument checks of the attention over window and sinks. Messages name the argument, what it is and what it needs."""

import math

import torch

from deltanet_kernels.checks import (
    check_changed,
    check_cu_seqlens,
    check_length,
    check_rotation,
    check_state_indices,
    refuse_gradients,
    require_device,
    require_input,
    require_least,
    require_shape,
    require_tensor,
    shape_text,
)
from deltanet_kernels.window.calls import EDGES, WindowCall, WindowKeepCall, WindowMixtureCall, WindowStepCall


def check_window_attention(call: WindowCall) -> None:
    """Check the arguments of an attention.

    Raises:
        ValueError: a shape, head count, device, offset, window, number of sinks, softcap or edge that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, window, sinks, _, cu_seqlens, softcap, edge = call
    _check_tokens(q, k, v)
    _check_reach(window, sinks)
    _check_softcap(softcap)
    if edge not in EDGES:
        raise ValueError(f"edge: got {edge}, expected one of {EDGES}")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1], q.device)


def check_window_step(call: WindowStepCall) -> None:
    """Check the arguments of a decoding step.

    Raises:
        ValueError: a shape, head count, device, window, number of sinks or softcap that does not fit, or a cache that
            is not contiguous.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, window, sinks, keys, values, numbers, count, _, padding, softcap, cos, sin, state_indices = call
    _check_tokens(q, k, v)
    _check_reach(window, sinks)
    _check_softcap(softcap)
    (B, T, _, D), HK, S = q.shape, k.shape[2], window + sinks
    if T != 1:
        raise ValueError(f"q: got shape {shape_text(q)} with {T} tokens, needs one token")
    rows = check_state_indices(state_indices, B, q.device, count)
    cache: tuple[tuple[str, torch.Tensor, tuple[int, ...], str, torch.dtype], ...] = (
        ("keys", keys, (rows, HK, S, D), "[B, HK, window + sinks, D]", k.dtype),
        ("values", values, (rows, HK, S, D), "[B, HK, window + sinks, D]", k.dtype),
        ("numbers", numbers, (rows, S), "[B, window + sinks]", torch.int32),
        ("count", count, (rows,), "[B]", torch.int32),
    )
    for name, x, shape, meaning, dtype in cache:
        require_tensor(name, x)
        require_device(name, x, "q", q.device)
        require_shape(name, x, shape, meaning)
        if x.dtype != dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {dtype}")
        check_changed(name, x, state_indices)
    check_rotation(cos, sin, B, 1, D, q.device)
    if padding is not None:
        require_device("padding", require_tensor("padding", padding), "q", q.device)
        require_shape("padding", padding, (B, 1), "[B, 1]")
        if padding.dtype != torch.bool:
            raise TypeError(f"padding: got dtype {padding.dtype}, needs torch.bool")


def check_window_mixture(call: WindowMixtureCall) -> None:
    """Check the arguments of a mixture.

    Raises:
        ValueError: a shape, device, number of places or reach that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    window_output, lse, state_output, share_logit, far_slope, near_slope = call[:6]
    places, reach, numbers, z, norm_weight = call[6:11]
    require_input("window_output", window_output, "window_output", window_output)
    if window_output.dim() != 4 or 0 in window_output.shape:
        raise ValueError(
            f"window_output: got shape {shape_text(window_output)}, needs [B, T, H, D] without empty dimensions"
        )
    B, T, H, D = window_output.shape
    require_least("places", places, 1)
    if reach is not None:
        require_least("reach", reach, 1)
    tokens = min(T, require_tensor("state_output", state_output).shape[1:2].numel())
    parts: tuple[tuple[str, torch.Tensor | None, tuple[int, ...], str], ...] = (
        ("lse", lse, (B, T, H), "[B, T, H]"),
        ("state_output", state_output, (B, tokens, H, D), "[B, T', H, D] with T' <= T"),
        ("share_logit", share_logit, (B, T, H), "[B, T, H]"),
        ("far_slope", far_slope, (H,), "[H]"),
        ("near_slope", near_slope, (H,), "[H]"),
    )
    optional: tuple[tuple[str, torch.Tensor | None, tuple[int, ...], str], ...] = (
        ("z", z, (B, T, H, D), "the shape of window_output"),
        (
            "norm_weight",
            norm_weight,
            (D,) if norm_weight is not None and norm_weight.dim() == 1 else (H, D),
            "[D] or [H, D]",
        ),
    )
    for name, x, shape, meaning in (*parts, *(part for part in optional if part[1] is not None)):
        require_shape(name, require_input(name, x, "window_output", window_output), shape, meaning)
    if numbers is not None:
        require_device("numbers", require_tensor("numbers", numbers), "window_output", window_output.device)
        if numbers.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"numbers: got dtype {numbers.dtype}, needs int32 or int64")
        require_shape("numbers", numbers, (B if numbers.shape[:1] == (B,) else 1, T), "[B, T] or [1, T]")
    tensors = (window_output, lse, state_output, share_logit, far_slope, near_slope, z, norm_weight)
    refuse_gradients("window_mixture", "operations of PyTorch", *tensors)


def check_window_keep(call: WindowKeepCall) -> None:
    """Check the arguments of `window_keep`.

    Raises:
        ValueError: a shape, device, window or number of sinks that does not fit.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    k, v, window, sinks, length = call
    _check_tokens(k, k, v)
    _check_reach(window, sinks)
    check_length(length, k)
    refuse_gradients("window_keep", "operations of PyTorch", k, v)


def _check_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_input(name, x, "q", q)
        if x.dim() != 4 or 0 in x.shape:
            heads = "HQ" if name == "q" else "HK"
            raise ValueError(f"{name}: got shape {shape_text(x)}, needs [B, T, {heads}, D] without empty dimensions")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    require_shape("k", k, (B, T, HK, D), "[B, T, HK, D] with B, T and D of q")
    require_shape("v", v, (B, T, HK, D), "the shape of k")
    if HQ % HK:
        raise ValueError(f"q: got {HQ} heads, needs a multiple of the {HK} heads of k")


def _check_reach(window: int, sinks: int) -> None:
    require_least("window", window, 1)
    require_least("sinks", sinks, 0)


def _check_softcap(softcap: float | None) -> None:
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap: got {type(softcap).__name__}, needs a float or None")
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap: got {softcap}, needs a finite number above 0, or None for no cap")
