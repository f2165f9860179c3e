"""The call of Titans' memory, its state, and the check of the arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.state_checks import check_state


class TitansState(NamedTuple):
    """The state after a token; float32, or float64 with float64 inputs."""

    memory: Tensor  # M [N, HV, K, V]
    momentum: Tensor  # Z [N, HV, K, V]


class TitansCall(NamedTuple):
    """One call of Titans' memory; `chunk_titans` documents the fields."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    log_mu: Tensor
    theta: Tensor
    scale: float | None = None
    initial_state: TitansState | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: Tensor | None = None
    padding: Tensor | None = None

    @property
    def rule(self) -> RuleCall:
        """The arguments that the gated delta rule has too."""
        return RuleCall(*self[:4], self.theta, self.scale, cu_seqlens=self.cu_seqlens)


def check_titans(call: TitansCall) -> TitansState:
    """Check the arguments of a Titans operator; returns the state before the first token.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    checks.check_delta_rule(call.rule)
    d = call.rule.dims
    dims = {"g": "B T HV", "log_mu": "B T HV", "padding?": "B T"}
    checks.check_tensors(call, dims, dtypes={"padding": (torch.bool,)})
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    shape = (d.N, d.HV, d.K, d.V)
    return TitansState(*check_state(call.initial_state, TitansState._fields, (shape, shape), dtype, call.q.device))
