"""Argument checks of the decoding step. A message names the argument, what it got and what it needs."""

from typing import get_args

import torch

from deltanet_kernels.arguments import Erase, StepCall
from deltanet_kernels.checks import (
    check_changed,
    check_rotation,
    check_tensors,
    require_input,
    require_least,
    require_log_decay,
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
    q, state, repeats = call.q, call.state, call.kv_repeats
    rows = "B" if call.state_indices is None else "R"
    wanted = (torch.float64 if q.dtype == torch.float64 else torch.float32, torch.bfloat16)
    B, T = require_tensor("q", q).shape[:2]
    dims = {"state": f"{rows} HV K V", "a": "B T HV", "b": "B T HV", "A_log?": "HV", "dt_bias?": "HV"}
    dims |= {"padding?": "B T", "state_indices?": "B"}
    dtypes = {"state": wanted, "padding": (torch.bool,), "state_indices": (torch.int32,)}
    sizes = check_tensors(call, dims, {"B": B, "T": T}, dtypes=dtypes)
    require_least("kv_repeats", repeats, 1)
    HV, K, V = sizes["HV"], sizes["K"], sizes["V"]
    heads = {name: _count_heads(name, getattr(call, name), call, size) for name, size in (("q", K), ("k", K), ("v", V))}
    HQ, H = heads["q"], heads["k"] * repeats
    if heads["v"] * repeats != HV:
        times = f" / {repeats}" if repeats > 1 else ""
        raise ValueError(f"v: got {heads['v']} heads of {V}, needs the {HV}{times} of the state")
    if HV % H or HQ % H or (HQ % HV and HV % HQ):
        raise ValueError(
            f"q: got {HQ} heads with {H} of k and {HV} of v, needs multiples of k's, one a multiple of the other"
        )
    if call.A_log is None:
        require_log_decay("a", call.a)
    if (call.A_log is None) != (call.dt_bias is None):
        raise ValueError("dt_bias: needs a tensor with A_log, and None without")
    if call.erase not in get_args(Erase):
        raise ValueError(f"erase: got {call.erase!r}, needs one of {', '.join(map(repr, get_args(Erase)))}")
    if call.allow_neg_eigval and not call.use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval: doubles a sigmoid, needs use_beta_sigmoid_in_kernel")
    if (call.conv_weight is None) != (call.conv_tail is None):
        raise ValueError("conv_tail: needs a tensor with conv_weight, and None without")
    sizes |= {"H": H, "HO": max(HQ, HV), "C": (HQ + H) * K + HV * V}
    further = {"state": dims["state"], "conv_weight?": "C W", "k_offset?": "H K"}
    further["norm_weight?"] = "V" if getattr(call.norm_weight, "ndim", 1) == 1 else "HO V"
    sizes = check_tensors(call, further, sizes, dtypes=dtypes)
    tail = {"state": dims["state"], "conv_tail?": f"{rows} C W-1"}
    check_tensors(call, tail, {**sizes, "W-1": sizes.get("W", 1) - 1}, dtypes=dtypes)
    if call.z is not None and _count_heads("z", call.z, call, V) != sizes["HO"]:
        raise ValueError(f"z: got shape {shape_text(call.z)}, needs {sizes['HO']} heads of {V}")
    for name, x in (("state", state), ("conv_tail", call.conv_tail)):
        if x is not None:
            check_changed(name, x, call.state_indices)
    check_rotation(call.cos, call.sin, B, T, K, q.device)


def _count_heads(name: str, x: torch.Tensor, call: StepCall, size: int) -> int:
    """Heads in x [B, T, heads * size] or [B, T, heads, size], of the dtype of q where it is k or v."""
    (B, T), x = call.q.shape[:2], require_input(name, x, "q", call.q)
    if name in "kv" and x.dtype != call.q.dtype:
        raise TypeError(f"{name}: got dtype {x.dtype}, needs {call.q.dtype} (the dtype of q)")
    width = x.shape[2] * (x.shape[3] if x.dim() == 4 else 1) if x.dim() in (3, 4) else 0
    if width == 0 or width % size or T == 0 or tuple(x.shape[:2]) != (B, T) or (x.dim() == 4 and x.shape[3] != size):
        raise ValueError(
            f"{name}: got shape {shape_text(x)}, needs [{B}, {T}, heads * {size}] or [{B}, {T}, heads, {size}], T >= 1"
        )
    return width // size
