"""The state of Titans' memory, and the checks of its operators' arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.state_checks import check_padding, check_state


class TitansState(NamedTuple):
    """The state after a token; float32, or float64 with float64 inputs."""

    memory: Tensor  # M [N, HV, K, V]
    momentum: Tensor  # Z [N, HV, K, V]


def check_titans(call: RuleCall, log_mu: Tensor, state: TitansState | None, padding: Tensor | None) -> TitansState:
    """Check the arguments of a Titans operator; returns the state before the first token.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    checks.check_delta_rule(call)
    d = call.dims
    if log_mu.shape != call.g.shape:
        raise ValueError(f"log_mu: got shape {list(log_mu.shape)}, needs that of g = {list(call.g.shape)}")
    check_padding(padding, d.B, d.T)
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    shape = (d.N, d.HV, d.K, d.V)
    return TitansState(*check_state(state, TitansState._fields, (shape, shape), dtype, call.q.device))
