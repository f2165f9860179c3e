"""The state of the Mesa layer, and the checks of its operators' arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.state_checks import check_state


class MesaState(NamedTuple):
    """The state after a token; float32, or float64 with float64 inputs."""

    values: Tensor  # S [N, HV, K, V]
    keys: Tensor  # H [N, HV, K, K], symmetric


def check_mesa(call: RuleCall, ridge: Tensor, state: MesaState | None) -> MesaState:
    """Check the arguments of a Mesa operator; returns the state before the first token.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    checks.check_delta_rule(call)
    d = call.dims
    if ridge.shape != (d.HV, d.K):
        raise ValueError(f"ridge: got shape {list(ridge.shape)}, needs [HV, K] = {[d.HV, d.K]}")
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    shapes = (d.N, d.HV, d.K, d.V), (d.N, d.HV, d.K, d.K)
    return MesaState(*check_state(state, MesaState._fields, shapes, dtype, call.q.device))
