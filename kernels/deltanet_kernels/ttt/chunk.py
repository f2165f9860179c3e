"""The operator of test-time training on whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import to_states
from deltanet_kernels.signatures import by_arguments
from deltanet_kernels.ttt.calls import InnerNorm, TTTCall, TTTState, check_ttt
from deltanet_kernels.ttt.grid import Grid
from deltanet_kernels.ttt.linear import linear_chunks
from deltanet_kernels.ttt.norm import norm_batches


@torch.compiler.disable  # unrolled, its steps would take minutes to compile
@by_arguments(TTTCall)
def chunk_ttt(call: TTTCall) -> tuple[Tensor, TTTState | None]:
    """Test-time training with a linear inner model (arXiv 2407.04620), differentiable; ttt/__init__.py has the rule.

    Computed in float32 (float64 for float64 inputs).

    Args:
        q, k, v: queries [B, T, HQ, K], keys [B, T, H, K], values [B, T, HV, V], with the head counts of
            `chunk_gated_delta_rule`; with `norm`, K = V.
        g: log decay, <= 0 [B, T, HV].
        eta: step size [B, T, HV]. With m equal unit keys in a mini-batch the linear form is stable for eta <= 2/m.
        mini_batch: m, the number of tokens whose gradients are taken at the same weights; >= 1.
        norm: the layer norm of the form `norm`; None for the form `linear`.
        scale: factor of the output, K**-0.5 by default; the form `norm` has none.
        initial_state: zeros by default; it may lie in the middle of a mini-batch.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: boundaries [N+1] of packed sequences as for `chunk_gated_delta_rule`, without an initial state.
        padding: [B, T] bool, True at tokens that neither change the state nor count in a mini-batch. Their outputs
            have no meaning.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0, a mini-batch below 1.
        TypeError: dtypes that do not fit.
    """
    before = check_ttt(call)
    q, k, v, g, eta, mini_batch, norm, scale, state = call[:9]
    dtype = before.weight.dtype
    grid = Grid.of(q, mini_batch, None if state is None else before.tokens, call.padding, call.cu_seqlens)
    with no_autocast(q.device):
        parts = (*to_states(q, k, v, call.use_qk_l2norm_in_kernel, dtype), g.to(dtype), eta.to(dtype))
        q_, k_, v_, g_, eta_ = (grid.spread(x) for x in parts)
        placed = RuleCall(q_, k_, v_, g_, eta_, scale, None, call.output_final_state, False, grid.cu_seqlens)
        if norm is None:
            o, weight, pending = linear_chunks(placed, mini_batch, before, state is not None, grid.ends)
        else:
            norm = InnerNorm(*(x.to(dtype) for x in norm))
            o, weight, pending = norm_batches(placed, mini_batch, norm, before, grid.ends)
    final = TTTState(weight, pending, (grid.ends % mini_batch).int()) if call.output_final_state else None
    return grid.collect(o).to(v.dtype), final
