"""Calls that flash-linear-attention takes, as the calls that the kernels take.

The kernels take q, k and v in one dtype and a float32 state [K, V], and their gates have a bias. Other calls are turned
into such calls here, by operations that autograd records: each gradient comes back in the dtype and layout of its
input.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.config import MAX_HEAD_SIZE, MIN_HALF_SIZE
from deltanet_kernels.common.device import capability
from deltanet_kernels.common.registration import cached
from deltanet_kernels.gated_delta_rule.chips import chunk_config
from deltanet_kernels.gated_delta_rule.cpu_forward import CHUNK

Result = tuple[torch.Tensor, torch.Tensor | None]

CHUNK_SIZES = (16, 32, 64)

# Arguments of flash-linear-attention without a counterpart: the value that changes nothing, and why there is none.
_WITHOUT_EFFECT: dict[str, tuple[object, str]] = {
    "cu_seqlens_cpu": (None, "the offsets are read from cu_seqlens"),
    "chunk_indices": (None, "the chunks are computed from cu_seqlens"),
    "cp_context": (None, "a call is not split over devices"),
    "head_first": (False, "tensors are [B, T, heads, size]"),
}


def read_others(operator: str, others: dict[str, object], state_v_first: bool) -> bool:
    """`state_v_first`, from its old name if that is among the other arguments of a call.

    Raises:
        ValueError: an argument that would have no effect, or both names of one.
        TypeError: an argument that neither flash-linear-attention nor this operator has.
    """
    for name, value in others.items():
        if name == "transpose_state_layout":
            if state_v_first:
                raise ValueError("transpose_state_layout: is the old name of state_v_first, which is set; leave it out")
            warnings.warn("transpose_state_layout is the old name of state_v_first.", DeprecationWarning, stacklevel=3)
            state_v_first = bool(value)
        elif name in _WITHOUT_EFFECT:
            default, reason = _WITHOUT_EFFECT[name]
            if value is not default:
                raise ValueError(f"{name}: does nothing in {operator} ({reason}); leave it out")
        elif name == "chunk_size":
            raise ValueError(f"chunk_size: does nothing in {operator} (the recurrence has no chunks); leave it out")
        else:
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")
    return state_v_first


def _dtype(call: RuleCall) -> torch.dtype:
    """The dtype in which q, k and v can be multiplied."""
    return torch.promote_types(torch.promote_types(call.q.dtype, call.k.dtype), call.v.dtype)


def plain(call: RuleCall) -> RuleCall:
    """The same function of the same inputs as a call for the kernels; `call` has gone through `check_delta_rule`.

    The result's state is [K, V] in any case, and its output in the promoted dtype of q, k and v.
    """
    dtype = _dtype(call)
    beta, state, bias = call.beta, call.initial_state, call.dt_bias
    if call.allow_neg_eigval:
        beta = 2 * beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid()
    if state is not None:
        state = state.to(torch.promote_types(dtype, torch.float32))
        state = state.transpose(2, 3) if call.state_v_first else state
    if call.use_gate_in_kernel and bias is None and call.A_log is not None:
        bias = torch.zeros_like(call.A_log)
    return call._replace(
        q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype), beta=beta, initial_state=state,
        dt_bias=bias, use_beta_sigmoid_in_kernel=call.use_beta_sigmoid_in_kernel and not call.allow_neg_eigval,
        allow_neg_eigval=False, state_v_first=False,
    )  # fmt: skip


def through_plain(kernels: Callable[[RuleCall], Result], call: RuleCall, dtype: torch.dtype) -> Result:
    """Run the plain form of a checked call; the output comes in `dtype`, the state in the layout of the call."""
    o, state = kernels(plain(call))
    return o.to(dtype), in_layout(state, call.state_v_first)


def in_layout(state: torch.Tensor | None, v_first: bool) -> torch.Tensor | None:
    """A state [N, HV, K, V], contiguous as [N, HV, V, K] with `v_first`."""
    return state if state is None or not v_first else state.transpose(2, 3).contiguous()


def check_chunk_size(call: RuleCall, size: int) -> None:
    """Say once how many tokens a chunk has, if a checked call wants another number.

    Raises:
        ValueError: a number other than 16, 32 or 64.
    """
    if size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size: got {size!r}, needs 16, 32 or 64")
    if torch.compiler.is_compiling():
        return
    used = _tokens_per_chunk(call)
    if used != size:
        _say_chunk_size(size, used)


def _tokens_per_chunk(call: RuleCall) -> int:
    K, V, dtype = call.k.shape[3], call.v.shape[3], _dtype(call)
    if not call.q.is_cuda or max(K, V) > MAX_HEAD_SIZE or dtype == torch.float64:
        return CHUNK
    return chunk_config(K, V, torch.float32 if min(K, V) < MIN_HALF_SIZE else dtype, capability(call.q.device)).C


@cached
def _say_chunk_size(size: int, used: int) -> None:
    warnings.warn(
        f"chunk_size={size}: chunk_gated_delta_rule uses chunks of {used} tokens, which its kernels are made for; "
        "the results differ by rounding only.",
        UserWarning,
        stacklevel=5,
    )
