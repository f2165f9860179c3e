"""The public operator of the Mesa layer for training and prefill."""

from __future__ import annotations

from torch import Tensor

from deltanet_kernels import dispatch
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.mesa.cpu import chunk_mesa_torch
from deltanet_kernels.mesa.solve import STEPS
from deltanet_kernels.mesa.state import MesaState, check_mesa


def chunk_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    scale: float | None = None,
    initial_state: MesaState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    steps: int = STEPS,
) -> tuple[Tensor, MesaState | None]:
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
    call = RuleCall(q, k, v, g, beta, scale, None, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    before = check_mesa(call, ridge, initial_state)
    o, final = dispatch.call("chunk_mesa", chunk_mesa_torch, q, call, ridge, before, steps)
    return o, final
