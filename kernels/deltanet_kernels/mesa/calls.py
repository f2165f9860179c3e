"""The call of the Mesa layer, its state, and the check of the arguments."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.state_checks import check_state
from deltanet_kernels.mesa.solve import STEPS


class MesaState(NamedTuple):
    """The state after a token; float32, or float64 with float64 inputs."""

    values: Tensor  # S [N, HV, K, V]
    keys: Tensor  # H [N, HV, K, K], symmetric


class MesaCall(NamedTuple):
    """The Mesa layer (MesaNet, arXiv 2506.05233), differentiable; mesa/__init__.py has the rule.

    Computed in float32 (float64 for float64 inputs), because conjugate gradients do not converge in less; on CUDA by
    Triton kernels for keys of up to 128 and, with the values, up to 256 channels.

    Args:
        q, k, v: queries [B, T, HQ, K], keys [B, T, H, K], values [B, T, HV, V], with the head counts of
            `chunk_gated_delta_rule`.
        g, beta: log decay, <= 0, and write weight, >= 0 [B, T, HV]; 0 and 0 leave the state as it is.
        ridge: Lambda [HV, K], positive. With less than 0.25, `steps` may not suffice for short memories.
        scale: factor of the output, K**-0.5 by default.
        initial_state: zeros by default.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: boundaries [N+1] of packed sequences as for `chunk_gated_delta_rule`.
        steps: steps of conjugate gradients, forward and backward.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    ridge: Tensor
    scale: float | None = None
    initial_state: MesaState | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: Tensor | None = None
    steps: int = STEPS

    @property
    def rule(self) -> RuleCall:
        """The arguments that the gated delta rule has too."""
        return RuleCall(
            *self[:5], self.scale, None, self.output_final_state, self.use_qk_l2norm_in_kernel, self.cu_seqlens
        )

    def first_state(self) -> MesaState:
        """The state before the first token; raises ValueError or TypeError for one that does not fit."""
        d, dtype = self.rule.dims, torch.promote_types(self.q.dtype, torch.float32)
        shapes = (d.N, d.HV, d.K, d.V), (d.N, d.HV, d.K, d.K)
        return MesaState(*check_state(self.initial_state, MesaState._fields, shapes, dtype, self.q.device))


def check_mesa(call: MesaCall) -> None:
    """Check the arguments of a Mesa operator; `MesaCall.first_state` checks the state.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    checks.check_delta_rule(call.rule)
    checks.check_tensors(call, {**checks.QKV, "ridge": "HV K"})
