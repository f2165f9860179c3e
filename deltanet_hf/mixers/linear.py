"""Linear attention: a state that only adds (arXiv 2006.16236).

    S_t = S_{t-1} + phi(k_t) v_t^T        o_t = D^-0.5 phi(q_t)^T S_t

By default phi brings q and k to unit length, and the RMSNorm of the output takes the place of a normaliser (The Devil
in Linear Transformer, arXiv 2210.10340). With `feature_map` there is one:

    z_t = z_{t-1} + phi(k_t)              o_t = phi(q_t)^T S_t / (phi(q_t)^T z_t)

    elu        phi(x) = elu(x) + 1
    taylor     phi(q)^T phi(k) = 1 + s + s^2 / 2, the second order of softmax's exp(s); s = q^T W_q W_k^T k with learned
               maps to `feature_dim` channels, so that the state stays small

z is one more column of the state: the values get a channel that is always 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_hf.mixers.layer import (
    AdditiveSettings,
    DeltaRule,
    MixCall,
    MixerProjections,
    Projected,
    State,
    TensorShape,
)
from deltanet_hf.mixers.layer.delta_rule import delta_rule, wide_range
from deltanet_hf.mixers.layer.feature_maps import TaylorFeatures, elu_features, taylor_size

FeatureMap = Literal["none", "elu", "taylor"]
LARGEST_FEATURE_DIM = 21  # 253 features: the kernels take key sizes up to 256
TINY = 1e-30  # a normaliser below it belongs to padding, which has read nothing


@dataclass(frozen=True)
class LinearSettings(AdditiveSettings):
    """Settings of linear attention."""

    feature_map: FeatureMap = "none"  # none: q and k at unit length, without a normaliser
    feature_dim: int = 16  # channels per head that the Taylor features are made of

    def validate(self, where: str) -> None:
        super().validate(where)
        if type(self.feature_dim) is not int or not 1 <= self.feature_dim <= LARGEST_FEATURE_DIM:
            raise ValueError(f"{where}.feature_dim: got {self.feature_dim!r}, expected 1 to {LARGEST_FEATURE_DIM}")


class Linear(DeltaRule):
    """The layer of linear attention; see the module's docstring for the rule."""

    name: ClassVar[str] = "linear"
    title: ClassVar[str] = "linear attention"
    Settings: ClassVar[type[MixerProjections]] = LinearSettings
    settings: LinearSettings  # type: ignore[assignment]
    decays = "never"
    strengths = "one"
    erase = "off"
    is_gated_delta_rule = True

    def add_gates(self) -> None:
        self.features = None
        if self.settings.feature_map == "taylor":
            heads = self.q_proj.out_features // self.head_dim
            self.features = TaylorFeatures(heads, self.num_states, self.head_dim, self.settings.feature_dim)

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay 0 and write strength 1, both [B, T, HV] float32; the strength is 0 at padding."""
        beta = torch.ones(*projected.x.shape[:2], self.num_states, device=projected.x.device)
        if padding is not None:
            beta = beta.masked_fill(padding.unsqueeze(-1), 0.0)
        return torch.zeros_like(beta), beta

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        if self.settings.feature_map == "none":
            return super().mix(call)
        q, k, v = wide_range(call)
        q, k = (elu_features(q), elu_features(k)) if self.features is None else self.features(q, k)
        mapped = call._replace(q=q, k=k, v=F.pad(v, (0, 1), value=1.0))
        output, state = delta_rule(mapped, self.settings.state_dtype, unit_length=False, erase=self.erase)
        return (output[..., :-1] / output[..., -1:].clamp_min(TINY)).to(call.v.dtype), state

    def adapt_to(self, q: Tensor, k: Tensor) -> None:
        if self.features is not None:
            self.features.adapt(q, k)

    def recurrent_shapes(self) -> dict[str, TensorShape]:
        plain = super().recurrent_shapes()
        if self.settings.feature_map == "none":
            return plain
        states, keys, values = plain["state"].shape
        if self.settings.feature_map == "taylor":
            keys = taylor_size(self.settings.feature_dim)
        return {"state": TensorShape((states, keys, values + 1), plain["state"].dtype)}
