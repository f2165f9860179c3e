"""Argument checks of the rule with a decay per channel. Messages name the argument, what it is and what it needs."""

import torch

from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.checks import (
    _require_device,
    _require_float,
    _require_shape,
    _require_tensor,
    _shape,
    check_cu_seqlens,
)


def check_channel_rule(call: ChannelCall) -> None:
    """Check the arguments of a call.

    Raises:
        ValueError: a shape, head count, device or offset that does not fit, or an erase key without erasing.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, g, beta, p, state = *call[:6], call.initial_state
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | ({} if p is None else {"erase_key": p})
    for name, x in given.items():
        _require_float(name, _require_tensor(name, x))
        _require_device(name, x, "q", q.device)
    for name, x, meaning in (("q", q, "[B, T, HQ, K]"), ("k", k, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]")):
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {_shape(x)}, needs 4 dimensions {meaning}")
        if 0 in x.shape:
            raise ValueError(f"{name}: got shape {_shape(x)}, needs no empty dimension and at least one token")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    (B, T, HQ, K), H, (HV, V) = q.shape, k.shape[2], v.shape[2:]
    _require_shape("k", k, (B, T, H, K), "[B, T, H, K] with B, T and K of q")
    _require_shape("v", v, (B, T, HV, V), "[B, T, HV, V] with B and T of q")
    if HV % H:
        raise ValueError(f"v: got {HV} heads, needs a multiple of the {H} heads of k")
    if HQ % H:
        raise ValueError(f"q: got {HQ} heads, needs a multiple of the {H} heads of k")
    if HQ % HV and HV % HQ:
        raise ValueError(f"q: got {HQ} heads, needs a multiple or a divisor of the {HV} heads of v")
    _require_shape("g", g, (B, T, HV, K), "[B, T, HV, K] with HV of v and K of k")
    _require_shape("beta", beta, (B, T, HV), "[B, T, HV] with HV of v")
    if p is not None:
        if not call.erase:
            raise ValueError("erase_key: got a tensor, needs None with erase=False, which never reads the state")
        _require_shape("erase_key", p, (B, T, HV, K), "[B, T, HV, K] with HV of v and K of k")
        if p.dtype != q.dtype:
            raise TypeError(f"erase_key: got dtype {p.dtype}, needs {q.dtype} (the dtype of q)")
    rows = B if call.cu_seqlens is None else check_cu_seqlens(call.cu_seqlens, B, T, q.device)
    if state is not None:
        _require_tensor("initial_state", state)
        wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
        if state.dtype != wanted:
            raise TypeError(f"initial_state: got dtype {state.dtype}, needs {wanted}")
        _require_device("initial_state", state, "q", q.device)
        _require_shape("initial_state", state, (rows, HV, K, V), "[N, HV, K, V]")
