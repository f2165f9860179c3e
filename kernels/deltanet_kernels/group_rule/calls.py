"""The call of the rule read at boundaries: its arguments, documented, and their check."""

from typing import NamedTuple

from torch import Tensor

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall

GROUP = 32
"""Tokens that are written together; a window moves by as many."""


class GroupRuleCall(NamedTuple):
    """The gated delta rule whose queries read the state before their group of 32 tokens, differentiable.

        S_0 = initial_state;  S_{i+1} = S_i after the writes of tokens 32 i ... 32 i + 31 by `chunk_gated_delta_rule`
        o_t = scale * q_t^T S_{t // 32}

    For a state of what has left a window of N groups, pass q[:, 32 N:] and k, v, g, beta[:, : T - 32 N]. Heads are
    grouped as in `chunk_gated_delta_rule`.

    Args:
        q: queries [B, T, HQ, K]; T >= 1, not necessarily a multiple of 32.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q.
        g: log decay per token, <= 0 [B, T, HV]; float32 is recommended.
        beta: write strength in [0, 2] [B, T, HV].
        scale: factor of the output, K**-0.5 by default.
        initial_state: [B, HV, K, V] float32 (float64 with float64 inputs); zeros by default.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state [B, HV, K, V] float32 or None.

    Raises:
        ValueError: shapes, head counts or devices that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False

    @property
    def rule(self) -> RuleCall:
        """The same arguments of the gated delta rule."""
        return RuleCall(*self)


def check_group_rule(call: GroupRuleCall) -> None:
    """Check the arguments of a call; raises ValueError or TypeError."""
    checks.check_delta_rule(call.rule)
