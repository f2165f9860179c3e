"""The call of the rule with a decay per channel: its arguments, documented, as one typed object; and its check."""

from typing import NamedTuple

import torch

from deltanet_kernels.arguments import RuleCall, RuleDims
from deltanet_kernels.checks import (
    QKV,
    check_cu_seqlens,
    check_heads,
    check_tensors,
    require_log_decay,
    require_tensor,
    state_rows,
)


class ChannelCall(NamedTuple):
    """The delta rule with a decay per key channel, chunk by chunk, differentiable.

        S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - p_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale * q_t^T S_t

    With p = k it is Kimi Delta Attention (arXiv 2510.26692), with p = b * k the rule of Gated DeltaNet-2
    (arXiv 2605.22791), without erasing gated linear attention (arXiv 2312.06635). Any g <= 0 is safe, -inf included.
    Heads are grouped as in `chunk_gated_delta_rule`.

    Args:
        q: queries [B, T, HQ, K]; T >= 1.
        k: keys [B, T, H, K], dtype of q.
        v: values [B, T, HV, V], dtype of q.
        g: log decay per token and key channel, <= 0 [B, T, HV, K]; float32 is recommended. Values are checked on CPUs
            only.
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
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0, an erase key without erasing, a log
            decay above 0.
        TypeError: dtypes that do not fit.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    erase_key: torch.Tensor | None = None
    erase: bool = True
    initial_state: torch.Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    cu_seqlens: torch.Tensor | None = None
    scale: float | None = None

    @property
    def factor(self) -> float:
        """The factor of the output: `scale`, or K**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)

    @property
    def dims(self) -> RuleDims:
        """Sizes of checked arguments."""
        return RuleCall(*self[:5], cu_seqlens=self.cu_seqlens).dims

    def needs_gradients(self) -> bool:
        """Whether autograd records this call."""
        inputs = (self.q, self.k, self.v, self.g, self.beta, self.erase_key, self.initial_state)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def check_channel_rule(call: ChannelCall) -> None:
    """Check the arguments of a call.

    Raises:
        ValueError: a shape, head count, device or offset that does not fit, an erase key without erasing, or a log
            decay above 0.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, cu_seqlens = require_tensor("q", call.q), call.cu_seqlens
    rows, sizes = state_rows(cu_seqlens)
    dims = {**QKV, "g": "B T HV K", "beta": "B T HV", "erase_key?": "B T HV K", "initial_state?": f"{rows} HV K V"}
    wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
    sizes = check_tensors(call, dims, sizes, ("k", "v", "erase_key"), {"initial_state": (wanted,)})
    check_heads(sizes)
    require_log_decay("g", call.g)
    if call.erase_key is not None and not call.erase:
        raise ValueError("erase_key: got a tensor, needs None with erase=False, which never reads the state")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, sizes["B"], sizes["T"], q.device)
