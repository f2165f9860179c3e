"""Several writes per token: n_h generalised Householder steps (Gated DeltaProduct, arXiv 2502.10297).

Token t has n_h keys k_{t,j} (of unit length), values v_{t,j} and write strengths beta_{t,j}, one decay g_t and one
query. With S_{t,0} = exp(g_t) S_{t-1},

    S_{t,j} = (I - beta_{t,j} k_{t,j} k_{t,j}^T) S_{t,j-1} + beta_{t,j} k_{t,j} v_{t,j}^T,   j = 1 .. n_h
    S_t = S_{t,n_h}        o_t = D^-0.5 q_t^T S_t

Its transition is a product of n_h Householder-like factors instead of one: it can rotate, and write n_h associations a
token. To the gated delta rule it is a sequence n_h times as long, whose first step of each token decays (g = 0 at the
others) and whose last one is read, so the operators are those of n_h = 1.

Shapes: B batch, T tokens, H query heads, HV heads of k, v and state, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

START_STRENGTH = 0.02  # of a new step; at 0 neither its keys nor its values would have a gradient
START_NOISE = 0.1  # of its keys, relative: several new steps must not begin, and so remain, the same


class HouseholderStep(nn.Module):
    """Projections of one write beyond the teacher's: keys, values and the logit of the write strength.

    Args:
        keys: the teacher's k_proj, for its shape.
        heads: HV. `b_proj` has a bias in any wiring: the start needs a constant strength near 0.
    """

    def __init__(self, keys: nn.Linear, heads: int) -> None:
        super().__init__()
        hidden, channels = keys.in_features, keys.out_features
        self.k_proj = nn.Linear(hidden, channels, bias=keys.bias is not None)
        self.v_proj = nn.Linear(hidden, channels, bias=False)
        self.b_proj = nn.Linear(hidden, heads)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, T, hidden] -> k, v [B, T, HV*D], logit of beta [B, T, HV]."""
        return self.k_proj(x), self.v_proj(x), self.b_proj(x)

    @torch.no_grad()
    def start(self, keys: nn.Linear) -> None:
        """The teacher's keys with a little noise, values 0, strength `START_STRENGTH`; `keys` is the layer's k_proj.

        The model then begins as it would without the step, up to the little that a weak write of nothing erases, so
        what training makes of it is due to the capacity, not to the start. Values of 0, because any others would be
        read at once; the teacher's keys, because those are what its queries look for. The teacher's own write comes
        last of a token's: nothing new erases from it before it is read.
        """
        noise = START_NOISE * keys.weight.std() * torch.randn_like(keys.weight)
        self.k_proj.weight.copy_(keys.weight + noise)
        if self.k_proj.bias is not None:
            self.k_proj.bias.copy_(keys.bias)
        nn.init.zeros_(self.v_proj.weight)
        nn.init.zeros_(self.b_proj.weight)
        nn.init.constant_(self.b_proj.bias, math.log(START_STRENGTH / (1 - START_STRENGTH)))


def interleave(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> list[torch.Tensor]:
    """Inputs of the gated delta rule with the n_h steps of each token one after the other in time.

    Args:
        q: [B, T, H, D]; k, v: [B, T, n_h*HV, D], the heads of the first step first; g: [B, T, HV];
        beta: [B, T, n_h*HV]. The keys may have fewer heads, as in the operator.

    Returns:
        The same five as [B, T*n_h, ...]; queries and decays are 0 where the operator is not to read or to forget.
    """
    steps = beta.shape[2] // g.shape[2]
    q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2)
    g = F.pad(g.unsqueeze(2), (0, 0, 0, steps - 1)).flatten(1, 2)
    k, v, beta = (x.unflatten(2, (steps, -1)).flatten(1, 2) for x in (k, v, beta))
    return [q, k, v, g, beta]
