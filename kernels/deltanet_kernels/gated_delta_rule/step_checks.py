"""Argument checks of the decoding step. A message names the argument, what it got and what it needs."""

from typing import get_args

import torch

from deltanet_kernels.arguments import Erase, StepCall
from deltanet_kernels.checks import (
    check_changed,
    check_rotation,
    check_state_indices,
    require_device,
    require_float,
    require_least,
    require_log_decay,
    require_shape,
    require_tensor,
    shape_text,
)


def check_gated_delta_step(call: StepCall) -> None:
    """Check the arguments of a decoding step.

    Raises:
        ValueError: a shape, head count or device that does not fit, a state or tail that is not contiguous, or a log
            decay above 0.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, a, b, state, A_log, dt_bias, conv_weight, conv_tail, z, norm_weight, padding, cos, sin = call[:15]
    k_offset = call.k_offset
    given = {
        "q": q, "k": k, "v": v, "a": a, "b": b, "state": state, "A_log": A_log, "dt_bias": dt_bias,
        "conv_weight": conv_weight, "conv_tail": conv_tail, "z": z, "norm_weight": norm_weight,
        "k_offset": k_offset,
    }  # fmt: skip
    tensors = {name: x for name, x in given.items() if x is not None}
    for name, x in tensors.items():
        require_float(name, require_tensor(name, x))
    if padding is not None:
        tensors["padding"] = padding
    for name, x in tensors.items():
        require_device(name, x, "q", q.device)
    if state.dim() != 4 or 0 in state.shape:
        raise ValueError(f"state: got shape {shape_text(state)}, needs [B, HV, K, V] without empty dimensions")
    for name in ("state", "conv_tail"):
        if name in tensors:
            check_changed(name, tensors[name], call.state_indices)
    HV, K, V = state.shape[1:]
    B, T = q.shape[:2]
    rows = check_state_indices(call.state_indices, B, q.device, state)
    wanted = (torch.float64 if q.dtype == torch.float64 else torch.float32, torch.bfloat16)
    if state.dtype not in wanted:
        raise TypeError(f"state: got dtype {state.dtype}, needs {' or '.join(map(str, wanted))}")
    require_shape("state", state, (rows, HV, K, V), "[B, HV, K, V] with B of q")
    heads = {name: _count_heads(name, x, B, T, size) for name, x, size in (("q", q, K), ("k", k, K), ("v", v, V))}
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    require_least("kv_repeats", call.kv_repeats, 1)
    HQ, H = heads["q"], heads["k"] * call.kv_repeats
    if heads["v"] * call.kv_repeats != HV:
        times = f" / {call.kv_repeats}" if call.kv_repeats > 1 else ""
        raise ValueError(f"v: got {heads['v']} heads of {V}, needs the {HV}{times} of the state")
    if HV % H or HQ % H or (HQ % HV and HV % HQ):
        raise ValueError(
            f"q: got {HQ} heads with {H} of k and {HV} of v, needs multiples of k's, one a multiple of the other"
        )
    HO = max(HQ, HV)
    for name, x in (("a", a), ("b", b)):
        require_shape(name, x, (B, T, HV), "[B, T, HV] with HV of the state")
    if A_log is None:
        require_log_decay("a", a)
    if (A_log is None) != (dt_bias is None):
        raise ValueError("dt_bias: needs a tensor with A_log, and None without")
    for name in ("A_log", "dt_bias"):
        if name in tensors:
            require_shape(name, tensors[name], (HV,), "[HV]")
    if call.erase not in get_args(Erase):
        raise ValueError(f"erase: got {call.erase!r}, needs one of {', '.join(map(repr, get_args(Erase)))}")
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: doubles a sigmoid, needs use_beta_sigmoid_in_kernel")
    if (conv_weight is None) != (conv_tail is None):
        raise ValueError("conv_tail: needs a tensor with conv_weight, and None without")
    if conv_weight is not None and conv_tail is not None:
        C = (HQ + H) * K + HV * V
        if conv_weight.dim() != 2 or conv_weight.shape[0] != C or conv_weight.shape[1] < 1:
            raise ValueError(f"conv_weight: got shape {shape_text(conv_weight)}, needs [C, W] with C = {C} and W >= 1")
        require_shape("conv_tail", conv_tail, (rows, C, conv_weight.shape[1] - 1), "[B, C, W-1]")
    if z is not None and _count_heads("z", z, B, T, V) != HO:
        raise ValueError(f"z: got shape {shape_text(z)}, needs {HO} heads of {V}")
    if norm_weight is not None and tuple(norm_weight.shape) not in ((V,), (HO, V)):
        raise ValueError(f"norm_weight: got shape {shape_text(norm_weight)}, needs [{V}] or [{HO}, {V}]")
    if k_offset is not None:
        require_shape("k_offset", k_offset, (H, K), "[H, K] with H of k")
    if padding is not None:
        require_shape("padding", padding, (B, T), "[B, T]")
        if padding.dtype != torch.bool:
            raise TypeError(f"padding: got dtype {padding.dtype}, needs torch.bool")
    check_rotation(cos, sin, B, T, K, q.device)


def _count_heads(name: str, x: torch.Tensor, B: int, T: int, size: int) -> int:
    """Heads in x [B, T, heads * size] or [B, T, heads, size]."""
    width = x.shape[2] * (x.shape[3] if x.dim() == 4 else 1) if x.dim() in (3, 4) else 0
    if width == 0 or width % size or T == 0 or tuple(x.shape[:2]) != (B, T) or (x.dim() == 4 and x.shape[3] != size):
        raise ValueError(
            f"{name}: got shape {shape_text(x)}, needs [{B}, {T}, heads * {size}] or [{B}, {T}, heads, {size}], T >= 1"
        )
    return width // size
