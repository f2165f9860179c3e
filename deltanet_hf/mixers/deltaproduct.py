"""Gated DeltaProduct: several writes per token (arXiv 2502.10297).

Token t has n_h keys k_{t,j} of unit length, values v_{t,j} and write strengths beta_{t,j}, one log decay g_t and one
query. With S_{t,0} = exp(g_t) S_{t-1},

    S_{t,j} = (I - beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + beta_{t,j} k_{t,j} v_{t,j}^T,   j = 1 .. n_h
    S_t = S_{t,n_h}        o_t = D^-0.5 q_t^T S_t

The transition matrix is a product of n_h Householder-like factors instead of one, so a token can write n_h
associations. With strengths of at most 1 every factor contracts: the product of two has real eigenvalues from 0 to 1,
so it neither rotates nor reflects, and more of them turn a little at most. With `allow_neg_eigval` a strength of 2
makes a factor a reflection, and two reflections are a rotation. To the gated delta rule this is a sequence n_h times as
long, in which the first write of each token decays (g = 0 at the others) and the last one is read, so the operators are
those of Gated DeltaNet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer import DeltaRule, MixCall, MixerProjections, Projected, State
from deltanet_hf.mixers.layer.delta_rule import closed, delta_rule
from deltanet_hf.mixers.layer.settings import check_at_least

START_STRENGTH = 0.02  # of a further write; at 0 neither its keys nor its values would have a gradient
START_NOISE = 0.1  # of its keys, relative to theirs: several further writes would otherwise stay the same


@dataclass(frozen=True)
class DeltaProductSettings(MixerProjections):
    """Settings of Gated DeltaProduct."""

    num_householder: int = 2  # n_h, writes per token

    def validate(self, where: str) -> None:
        super().validate(where)
        check_at_least(where, "num_householder", self.num_householder, 1)


class HouseholderStep(nn.Module):
    """Projections of one write beyond the teacher's: keys, values and the logit of the write strength.

    Args:
        keys: the layer's k_proj, for its shape.
        states: HV. `b_proj` always has a bias, because the start needs a constant strength near 0.
    """

    def __init__(self, keys: nn.Linear, states: int) -> None:
        super().__init__()
        hidden, channels = keys.in_features, keys.out_features
        self.k_proj = nn.Linear(hidden, channels, bias=keys.bias is not None)
        self.v_proj = nn.Linear(hidden, channels, bias=False)
        self.b_proj = nn.Linear(hidden, states)

    @torch.no_grad()
    def start(self, keys: nn.Linear, max_strength: float) -> None:
        """Begin with the teacher's keys and a little noise, values 0 and strength `START_STRENGTH`.

        The model then begins as it would without this write, up to the little that a weak write of nothing erases. The
        values are 0, because any others would be read at once; the keys are the teacher's, because those are what its
        queries look for. The teacher's own write is the last of a token, so nothing new erases from it before it is
        read.

        Args:
            keys: the layer's k_proj.
            max_strength: of the layer's writes.
        """
        noise = START_NOISE * keys.weight.std() * torch.randn_like(keys.weight)
        self.k_proj.weight.copy_(keys.weight + noise)
        if self.k_proj.bias is not None:
            self.k_proj.bias.copy_(keys.bias)
        nn.init.zeros_(self.v_proj.weight)
        nn.init.zeros_(self.b_proj.weight)
        share = START_STRENGTH / max_strength
        nn.init.constant_(self.b_proj.bias, math.log(share / (1 - share)))


class DeltaProduct(DeltaRule):
    """The Gated DeltaProduct layer; its own write is Gated DeltaNet's and the last of each token."""

    name: ClassVar[str] = "deltaproduct"
    title: ClassVar[str] = "Gated DeltaProduct"
    may_delay: ClassVar[bool] = False
    Settings: ClassVar[type[MixerProjections]] = DeltaProductSettings
    settings: DeltaProductSettings  # type: ignore[assignment]
    householder: nn.ModuleList

    @property
    def writes_per_token(self) -> int:
        return self.settings.num_householder

    def add_gates(self) -> None:
        super().add_gates()
        further = self.settings.num_householder - 1
        self.householder = nn.ModuleList(HouseholderStep(self.k_proj, self.num_states) for _ in range(further))

    def projected(self, x: Tensor, outputs: Sequence[Tensor | None]) -> Projected:
        """As in the base class, with k, v [B, T, n_h*HV*D], the heads of the first write first."""
        x, q, k, v, *others = super().projected(x, outputs)
        write: Any
        for write in self.householder:
            k_new, v_new = self.normalise(write.k_proj(x), self.k_norm), write.v_proj(x)
            k, v = torch.cat([k_new.to(k.dtype), k], dim=-1), torch.cat([v_new, v], dim=-1)
        return Projected(x, q, k, v, *others)

    def gates(self, projected: Projected, padding: Tensor | None) -> tuple[Tensor, ...]:
        """Log decay g [B, T, HV] and write strengths beta [B, T, n_h*HV] in the order of `projected`."""
        g, beta = super().gates(projected, padding)
        write: Any
        for write in self.householder:
            beta = torch.cat([self.strength(closed(write.b_proj(projected.x), padding)), beta], dim=-1)
        return g, beta

    def mix(self, call: MixCall) -> tuple[Tensor, State]:
        g, beta = call.gates
        n_h = beta.shape[-1] // g.shape[-1]
        q, k, v, g, beta = interleave(call.q, call.k, call.v, g, beta)
        cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens * n_h
        writes = MixCall(q, k, v, (g, beta), None, call.state, call.keep_state, cu_seqlens)
        output, state = delta_rule(writes, self.settings.state_dtype, recurrent=call.decodes)
        return output[:, n_h - 1 :: n_h], state

    def after_fit(self) -> None:
        """The further writes, whose number the fit of the teacher's own one does not depend on."""
        write: Any
        for write in self.householder:
            write.start(self.k_proj, self.max_strength)


def interleave(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Inputs of the gated delta rule, with the n_h writes of each token one after the other in time.

    Args:
        q: [B, T, HQ, D]; k, v: [B, T, n_h*HV, D], the heads of the first write first; g: [B, T, HV];
        beta: [B, T, n_h*HV]. The keys may have fewer heads, as in the operator.

    Returns:
        The same five as [B, T*n_h, ...]; queries and log decays are 0 where the operator neither reads nor decays.
    """
    n_h = beta.shape[2] // g.shape[2]
    q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, n_h - 1, 0)).flatten(1, 2)
    g = F.pad(g.unsqueeze(2), (0, 0, 0, n_h - 1)).flatten(1, 2)
    k, v, beta = (x.unflatten(2, (n_h, -1)).flatten(1, 2) for x in (k, v, beta))
    return q, k, v, g, beta
