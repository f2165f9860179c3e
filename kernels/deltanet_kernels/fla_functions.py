"""The gated delta rule with the arguments that flash-linear-attention's functions take, as calls of its operators."""

from __future__ import annotations

import torch

from deltanet_kernels import checks
from deltanet_kernels.arguments import Erase, RuleCall
from deltanet_kernels.fine_gates import present, recurrent_with_fine_gates
from deltanet_kernels.gated_delta_rule.drop_in import check_chunk_size, read_others, through_plain
from deltanet_kernels.operators import chunk_rule, recurrent_rule


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    erase: Erase = "decayed",
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    chunk_size: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule (Gated Delta Networks, arXiv 2412.06464, eq. 10), chunk by chunk, differentiable.

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T e^{g_t} S_{t-1})^T        o_t = scale * q_t^T S_t

    `erase` chooses other predictions: S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T R_t)^T.

    H divides HQ and HV, and HQ divides HV or HV divides HQ. With HO = max(HQ, HV), output head j reads state
    j // (HO/HV) with query head j // (HO/HQ), and state i is written with key head i // (HV/H): value heads
    may share a key head, and query heads may share a state.

    The function takes what that of flash-linear-attention 0.6 takes by keyword; docs/drop-in.md has the differences.

    Args:
        q: queries [B, T, HQ, K]; T >= 1.
        k: keys [B, T, H, K].
        v: values [B, T, HV, V]. If the dtypes of q, k and v differ, the widest is computed with.
        g: log decay per token, <= 0 [B, T, HV]; float32 is recommended. Values are checked on CPUs only. With
            use_gate_in_kernel: the raw logit a.
        beta: write strength [B, T, HV] in [0, 2]; its logit with use_beta_sigmoid_in_kernel.
        scale: factor of the output, K**-0.5 by default.
        initial_state: [N, HV, K, V] in any floating-point dtype, N = B or the number of packed sequences; zeros by
            default. The state is computed in float32 (float64 with float64 inputs).
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: offsets [N+1] (int32 or int64, first 0, never decreasing, last <= T) of sequences packed
            into one row (B = 1). Sequences may be empty; tokens after the last offset get o = 0, no gradient.
        A_log: [HV], required with use_gate_in_kernel.
        dt_bias: [HV], or None for zeros; with use_gate_in_kernel only.
        use_gate_in_kernel: the log decay is -exp(A_log) * softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: the write strength is sigmoid(beta).
        erase: the state R_t whose prediction k_t^T R_t a write subtracts from its value:
            "decayed": e^{g_t} S_{t-1}, the gated delta rule.
            "off": none, S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T (linear attention, retention, gated linear attention).
            "undecayed": S_{t-1}, as in Comba (arXiv 2506.02475). A closed gate then still erases.
        allow_neg_eigval: the write strength is 2 sigmoid(beta), so that the factors I - beta k k^T have eigenvalues
            down to -1 (arXiv 2411.12537); with use_beta_sigmoid_in_kernel.
        state_v_first: initial and final state are [N, HV, V, K]. Each is copied once.
        chunk_size: 16, 32 or 64, without effect: PyTorch and the kernels for 16-bit dtypes use chunks of 64 tokens,
            those for float32 and for heads smaller than 16 chunks of 32. A warning says so once if another is given.
        others: `transpose_state_layout`, the old name of state_v_first. Further arguments of flash-linear-attention
            have no counterpart, and an error names them.

    Returns:
        o [B, T, HO, V] in the dtype of q, and the final state [N, HV, K, V] float32 or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0, a log decay above 0, arguments that
            do nothing here.
        TypeError: dtypes that do not fit, unknown arguments.
    """
    if others:
        state_v_first = read_others("chunk_gated_delta_rule", others, state_v_first)
    call = RuleCall(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, A_log, dt_bias,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, erase, allow_neg_eigval, state_v_first,
    )  # fmt: skip
    plain = checks.check_delta_rule(call, drop_in=True)
    if chunk_size is not None:
        check_chunk_size(call, chunk_size)
    form = chunk_rule.unchecked
    return form(call) if plain else through_plain(form, call, q.dtype)


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    erase: Erase = "decayed",
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule by its recurrence, for decoding and short inputs.

    Arguments, results and errors are those of `chunk_gated_delta_rule`, except for those below; calls that need
    gradients use its kernels.

    Args:
        g: as there, or None for no decay per head.
        beta: as there, or per value channel [B, T, HV, V]. None is ones, before the sigmoid if there is one.
        gk: log decay per key channel, <= 0 [B, T, HV, K], added to g; with erase "decayed" or "off".
        gv: log decay per value channel, <= 0 [B, T, HV, V], added to g. With gates per value channel each of the HV * V
            columns of the states is computed as a head of its own; HQ <= HV.

    Returns:
        o [B, T, HO, V] in the dtype of v, and the final state as there.
    """
    if others:
        state_v_first = read_others("fused_recurrent_gated_delta_rule", others, state_v_first)
    if g is None or beta is None:
        if g is None and use_gate_in_kernel:
            raise ValueError("g: got None, needs the logits [B, T, HV] with use_gate_in_kernel")
        g, beta = present(v, g, 0.0), present(v, beta, 1.0)
    call = RuleCall(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, A_log, dt_bias,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, erase, allow_neg_eigval, state_v_first,
    )  # fmt: skip
    if gk is not None or gv is not None or getattr(beta, "ndim", 0) == 4:
        return recurrent_with_fine_gates(call, gk, gv)
    plain = checks.check_delta_rule(call, drop_in=True)
    form = recurrent_rule.unchecked
    return form(call) if plain else through_plain(form, call, v.dtype)
