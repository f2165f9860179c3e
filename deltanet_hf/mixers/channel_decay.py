"""A log decay per key channel, from a low-rank projection, and the rule that reads it on a mixer's state.

    g = -exp(A_log) softplus(f_up(f_down(x)) + dt_bias)

A_log is one number per state and dt_bias one per channel, as in Kimi Delta Attention (arXiv 2510.26692). The gate of
gated linear attention (arXiv 2312.06635), log sigmoid(y) / 16, is this one with exp(A_log) = 1/16 and y = -x.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.parts import DecayGate, Part
from deltanet_hf.mixers.state import State
from deltanet_kernels import chunk_channel_gated_delta_rule, fused_recurrent_channel_gated_delta_rule


class ChannelDecayGate(Part):
    """Log decay per key channel: g = -exp(A_log) * softplus(f + dt_bias), all in float32."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start of training from scratch: that of `DecayGate`, with steps that are spread over the channels."""
        heads, head_dim = self.dt_bias.shape
        scalar = DecayGate(heads)
        steps = torch.logspace(-3, -1, head_dim).expm1().log()
        with torch.no_grad():
            self.A_log.copy_(scalar.A_log)
            self.dt_bias.copy_(steps.expand(heads, head_dim))

    def forward(self, f: Tensor) -> Tensor:
        """f [B, T, HV, K] -> g [B, T, HV, K] float32, <= 0."""
        return -self.A_log.float().exp().unsqueeze(-1) * F.softplus(f.float() + self.dt_bias.float())


def gate_rank(states: int, head_dim: int) -> int:
    """Rank of the projection: the head size as published, and at least one per state, which a decay per head takes."""
    return max(states, head_dim)


def channel_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: State | None,
    keep_state: bool,
    cu_seqlens: Tensor | None,
    state_dtype: str,
    *,
    erase_key: Tensor | None = None,
    erase: bool = True,
    unit: bool = True,
) -> tuple[Tensor, State]:
    """The delta rule with a decay per channel on a mixer's state; arguments as in `Mixer.mix`.

    `unit` brings q and k to unit length. The new state is rounded to bfloat16 if `state_dtype` says so.
    """
    recurrent = q.shape[1] == 1 and not torch.is_grad_enabled()
    rule = fused_recurrent_channel_gated_delta_rule if recurrent else chunk_channel_gated_delta_rule
    output, new_state = rule(
        q,
        k,
        v,
        g,
        beta,
        erase_key,
        erase,
        initial_state=None if state is None else state["state"].to(torch.promote_types(q.dtype, torch.float32)),
        output_final_state=keep_state,
        use_qk_l2norm_in_kernel=unit,
        cu_seqlens=cu_seqlens,
    )
    if new_state is None:
        return output, {}
    return output, {"state": new_state.bfloat16() if state_dtype == "bfloat16" else new_state}
