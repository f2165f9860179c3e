"""The public operators of the delta rule with a decay per key channel."""

from __future__ import annotations

import torch

from deltanet_kernels import dispatch
from deltanet_kernels.channel_gates import cpu
from deltanet_kernels.channel_gates.arguments import ChannelCall
from deltanet_kernels.channel_gates.checks import check_channel_rule


def chunk_channel_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    erase_key: torch.Tensor | None = None,
    erase: bool = True,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule with a decay per key channel, chunk by chunk, differentiable.

        S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - p_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale * q_t^T S_t

    With p = k it is Kimi Delta Attention (arXiv 2510.26692), with p = b * k the rule of Gated DeltaNet-2
    (arXiv 2605.22791), without erasing gated linear attention (arXiv 2312.06635). Any g <= 0 is safe, -inf included.
    Heads are grouped as in `chunk_gated_delta_rule`.

    Args:
        q: queries [B, T, HQ, K]; T >= 1.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q.
        g: log decay per token and key channel, <= 0 [B, T, HV, K]; float32 is recommended.
        beta: write strength [B, T, HV].
        erase_key: p [B, T, HV, K], dtype of q; k by default. It is used as given, also where k is normalised.
        erase: False writes beta_t k_t v_t^T and never reads the state.
        initial_state: [N, HV, K, V] float32 (float64 with float64 inputs), N = B or the number of packed
            sequences; zeros by default.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: offsets [N+1] of sequences packed into one row (B = 1), as in `chunk_gated_delta_rule`.
        scale: factor of the output, K**-0.5 by default.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state [N, HV, K, V] float32 or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0, an erase key without erasing.
        TypeError: dtypes that do not fit.
    """
    call = ChannelCall(
        q, k, v, g, beta, erase_key, erase, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        scale,
    )  # fmt: skip
    check_channel_rule(call)
    return dispatch.call("chunk_channel_gated_delta_rule", cpu.chunked, q, call)  # type: ignore[no-any-return]


def fused_recurrent_channel_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    erase_key: torch.Tensor | None = None,
    erase: bool = True,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The delta rule with a decay per key channel by its recurrence, for decoding and short inputs.

    Arguments, results and errors are those of `chunk_channel_gated_delta_rule`; calls that need gradients use its
    kernels.
    """
    call = ChannelCall(
        q, k, v, g, beta, erase_key, erase, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        scale,
    )  # fmt: skip
    check_channel_rule(call)
    return dispatch.call("fused_recurrent_channel_gated_delta_rule", cpu.recurrent, q, call)  # type: ignore[no-any-return]
