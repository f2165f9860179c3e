"""The call of the rule with a decay per channel: its arguments, documented, as one typed object; and its check."""

from typing import NamedTuple

import torch

from deltanet_kernels.arguments import RuleCall, RuleDims
from deltanet_kernels.checks import (
    check_cu_seqlens,
    check_heads,
    require_device,
    require_input,
    require_log_decay,
    require_shape,
    require_tensor,
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
    q, k, v, g, beta, p, state = *call[:6], call.initial_state
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | ({} if p is None else {"erase_key": p})
    for name, x in given.items():
        require_input(name, x, "q", q)
        if name not in ("g", "beta") and x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    B, T, K, HV, V = check_heads(q, k, v)
    require_shape("g", g, (B, T, HV, K), "[B, T, HV, K] with HV of v and K of k")
    require_log_decay("g", g)
    require_shape("beta", beta, (B, T, HV), "[B, T, HV] with HV of v")
    if p is not None:
        if not call.erase:
            raise ValueError("erase_key: got a tensor, needs None with erase=False, which never reads the state")
        require_shape("erase_key", p, (B, T, HV, K), "[B, T, HV, K] with HV of v and K of k")
    rows = B if call.cu_seqlens is None else check_cu_seqlens(call.cu_seqlens, B, T, q.device)
    if state is not None:
        require_tensor("initial_state", state)
        wanted = torch.float64 if q.dtype == torch.float64 else torch.float32
        if state.dtype != wanted:
            raise TypeError(f"initial_state: got dtype {state.dtype}, needs {wanted}")
        require_device("initial_state", state, "q", q.device)
        require_shape("initial_state", state, (rows, HV, K, V), "[N, HV, K, V]")
