"""The call of test-time training, its state, and the check of the arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.state_checks import check_state


class InnerNorm(NamedTuple):
    """The learned parameters of the form `norm`, per state: those of the layer norm, and the first weights W_0.

    Without W_0 the norm would divide by nearly 0 at first, and the first writes would be too large to be corrected.
    """

    weight: Tensor  # [HV, V]
    bias: Tensor  # [HV, V]
    first: Tensor  # W_0 [HV, K + 1, V]; the last row is the bias of the inner model


class TTTState(NamedTuple):
    """The state after a token: S, and its difference from the weights B at which gradients are taken.

    Float32, or float64 with float64 inputs. R = K, or K + 1 in the form `norm`.
    """

    weight: Tensor  # S [N, HV, R, V]
    pending: Tensor  # S - B [N, HV, R, V]: what the current mini-batch has written; 0 where none has begun
    tokens: Tensor  # number of tokens of the current mini-batch [N] int32, 0 to m - 1


class TTTCall(NamedTuple):
    """One call of test-time training; `chunk_ttt` documents the fields."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    eta: Tensor
    mini_batch: int
    norm: InnerNorm | None = None
    scale: float | None = None
    initial_state: TTTState | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: Tensor | None = None
    padding: Tensor | None = None

    @property
    def rule(self) -> RuleCall:
        """The arguments that the gated delta rule has too."""
        return RuleCall(*self[:5], self.scale, cu_seqlens=self.cu_seqlens)


def check_ttt(call: TTTCall) -> TTTState:
    """Check the arguments of an operator; returns the state before the first token.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0, a mini-batch below 1, packed
            sequences with a state.
        TypeError: dtypes that do not fit.
    """
    checks.check_delta_rule(call.rule)
    d, norm, state = call.rule.dims, call.norm, call.initial_state
    if call.mini_batch < 1:
        raise ValueError(f"mini_batch: got {call.mini_batch}, needs at least 1 token")
    checks.check_tensors(call, {"g": "B T HV", "padding?": "B T"}, dtypes={"padding": (torch.bool,)})
    rows = d.K
    if norm is not None:
        rows += 1
        if d.K != d.V:
            raise ValueError(
                f"norm: got keys of {d.K} and values of {d.V} channels, needs equal numbers, because q and k are added "
                "to the inner model's output"
            )
        shapes = (d.HV, d.V), (d.HV, d.V), (d.HV, rows, d.V)
        for name, tensor, shape in zip(InnerNorm._fields, norm, shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"norm.{name}: got shape {list(tensor.shape)}, needs {list(shape)}")
    dtype, device = torch.promote_types(call.q.dtype, torch.float32), call.q.device
    if state is None:
        weight, pending = check_state(None, (), ((d.N, d.HV, rows, d.V),) * 2, dtype, device)
        return TTTState(weight, pending, torch.zeros(d.N, dtype=torch.int32, device=device))
    if call.cu_seqlens is not None:
        raise ValueError(
            "initial_state: packed sequences begin without one; continue each sequence in a row of a batch"
        )
    if tuple(state.tokens.shape) != (d.N,) or state.tokens.dtype != torch.int32:
        got = f"{list(state.tokens.shape)} of {state.tokens.dtype}"
        raise ValueError(f"initial_state.tokens: got {got}, needs [N] = [{d.N}] of torch.int32")
    check_state(state[:2], TTTState._fields[:2], ((d.N, d.HV, rows, d.V),) * 2, dtype, device)
    return state
