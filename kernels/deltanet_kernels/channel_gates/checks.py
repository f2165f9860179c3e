"""Argument checks of the rule with a decay per channel. Messages name the argument, what it is and what it needs."""

import torch

from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.checks import (
    check_cu_seqlens,
    check_heads,
    require_device,
    require_input,
    require_log_decay,
    require_shape,
    require_tensor,
)


def check_channel_rule(call: ChannelCall) -> None:
    """Check the arguments of a call.

    Raises:
        ValueError: a shape, head count, device or offset that does not fit, an erase key without erasing, or a log
            decay above 0.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, g, beta, p, state = *call[:6], call.initial_state
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | ({} if p is None else {"erase_key": p})
    for name, x in given.items():
        require_input(name, x, "q", q)
        if name not in ("g", "beta") and x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    B, T, K, HV, V = check_heads(q, k, v)
    require_shape("g", g, (B, T, HV, K), "[B, T, HV, K] with HV of v and K of k")
    require_log_decay("g", g)
    require_shape("beta", beta, (B, T, HV), "[B, T, HV] with HV of v")
    if p is not None:
        if not call.erase:
            raise ValueError("erase_key: got a tensor, needs None with erase=False, which never reads the state")
        require_shape("erase_key", p, (B, T, HV, K), "[B, T, HV, K] with HV of v and K of k")
    rows = B if call.cu_seqlens is None else check_cu_seqlens(call.cu_seqlens, B, T, q.device)
    if state is not None:
        require_tensor("initial_state", state)
        wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
        if state.dtype != wanted:
            raise TypeError(f"initial_state: got dtype {state.dtype}, needs {wanted}")
        require_device("initial_state", state, "q", q.device)
        require_shape("initial_state", state, (rows, HV, K, V), "[N, HV, K, V]")
