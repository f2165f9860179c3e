"""DeltaNet (arXiv 2102.11174; in chunks, arXiv 2406.06484): the delta rule without decay.

Per head, with a write strength beta_t:

    S_t = S_{t-1} + k_t beta_t (v_t - k_t^T S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q and k have unit length and beta = sigmoid(b_proj(x)), up to 2 with `allow_neg_eigval`. This is Gated DeltaNet with
g = 0. With beta = 1 a read of the last key returns its value; nothing is forgotten except by writing over it.

With `normalised`, after arXiv 2102.11174, q and k have positive features phi = elu + 1, and what is erased is the
normalised read of all keys before:

    S_t = S_{t-1} + phi(k_t) beta_t (v_t - S_{t-1}^T phi(k_t) / d_t)^T        z_t = z_{t-1} + phi(k_t)
    d_t = max(phi(k_t)^T z_{t-1}, |phi(k_t)|^2)

d_t grows with the number of tokens, so that late tokens hardly erase. Its lower bound is ours: it changes the first
tokens only, where the transition could have an eigenvalue below -1 and the read of the first one is 0 / 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltanet_hf.mixers.layer import (
    DeltaRule,
    MixCall,
    MixerProjections,
    Projected,
    State,
    StepGates,
    TensorShape,
)
from deltanet_hf.mixers.layer.delta_rule import closed, delta_rule, wide_range
from deltanet_hf.mixers.layer.feature_maps import elu_features
from deltanet_kernels import cumulative_sum

TINY = 1e-30  # a smaller normaliser is one of keys whose features are 0


@dataclass(frozen=True)
class DeltaNetSettings(MixerProjections):
    """Settings of DeltaNet."""

    normalised: bool = False  # positive features of q and k instead of unit length, and normalised reads

    def validate(self, where: str) -> None:
        super().validate(where)
        if self.normalised and self.allow_neg_eigval:
            raise ValueError(f"{where}.allow_neg_eigval: got true, but with normalised there are none; leave it out")


class DeltaNet(DeltaRule):
    """The DeltaNet layer; see the module's docstring for the rule and `Mixer` for what surrounds it."""

    name: ClassVar[str] = "deltanet"
    title: ClassVar[str] = "DeltaNet"
    Settings: ClassVar[type[MixerProjections]] = DeltaNetSettings
    settings: DeltaNetSettings  # type: ignore[assignment]
    decays = "never"
    is_gated_delta_rule = True

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay 0 and write strength beta, both [B, T, HV] float32; beta is 0 at padding."""
        beta = self.strength(closed(projected.b, padding))
        return torch.zeros_like(beta), beta

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        if not self.settings.normalised:
            return super().mix(call)
        (g, beta), (q, k, v) = call.gates, wide_range(call)
        q, k = elu_features(q), elu_features(k)
        d, key_sum = normalisers(k, beta, None if call.state is None else call.state["key_sum"], call.cu_seqlens)
        mapped = call._replace(q=q, k=k, v=(v * d.unsqueeze(-1)).to(v.dtype), gates=(g, beta / d))
        output, new = delta_rule(mapped, self.settings.state_dtype, unit_length=False)
        return output.to(call.v.dtype), {**new, "key_sum": key_sum} if call.keep_state else {}

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        shapes = super().recurrent_shapes()
        if self.settings.normalised:
            shapes["key_sum"] = TensorShape((self.num_states, self.head_dim), torch.float32)
        return shapes

    def step_gates(self, projected: Projected) -> StepGates:
        b = closed(projected.b, None)
        return StepGates(torch.zeros_like(b), b)


def normalisers(k: Tensor, beta: Tensor, key_sum: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The normalisers d of reads, and the sum of all keys after the last token of each sequence.

    Args:
        k: positive features [B, T, HV, D].
        beta: write strengths [B, T, HV]; a token of strength 0 (padding) is not in the sums.
        key_sum: z of the tokens before [B, HV, D], or None.
        cu_seqlens: boundaries of packed sequences, each of which begins with z = 0.

    Returns:
        d [B, T, HV] float32, and z [B or N, HV, D] float32.
    """
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    # In float64: sequences packed into one row subtract the sum of all rows before them.
    present = k.double() * (beta > 0).unsqueeze(-1)
    after = cumulative_sum(present)
    before = after - present
    end = after[:, -1]
    if cu_seqlens is not None:
        first = cu_seqlens.long().clamp_max(k.shape[1] - 1)
        sequence = torch.searchsorted(cu_seqlens.long(), torch.arange(k.shape[1], device=k.device), right=True) - 1
        end = after[0, cu_seqlens[1:].long() - 1] - before[0, first[:-1]]
        before = before - before[:, first[sequence]]
    if key_sum is not None:
        before, end = before + key_sum.unsqueeze(1), end + key_sum
    d = torch.maximum((k * before.to(k.dtype)).sum(-1), k.square().sum(-1))
    return d.clamp_min(TINY), end.to(k.dtype)
