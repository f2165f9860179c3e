"""The share of the state in a layer with a window: its start, and its value while the layer is fitted.

The start is a ridge regression: per head, the logarithm of the mean exponential of the scores that the window misses,
from the layer's input (deltanet_hf/mixers/layer/window_branch.py has the formula). From there the share is fitted
together with the gates. It grows with the number of unseen tokens, nearly in proportion, as in softmax attention. A
state forgets, which short calibration sequences hardly show: the share of one that holds what has left the window is
made to grow more slowly in the end (`slow`).

Shapes in comments: n sequences, T tokens, H query heads, D head size, R components.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.layer.window_branch import WindowBranch

RIDGE = 1e-2  # of the regression, relative to the mean square of a component
GROWTH = 0.5  # what `slow` leaves of the slopes over the number of unseen tokens
KEPT_AT = 128  # unseen tokens at which it keeps the share
QUERIES_AT_ONCE = 128  # whose scores are in memory


class ShareFit(nn.Module):
    """The parameters of the share, in the coordinates of the fit.

    Args:
        branch: the window of the layer.
        f: components of the layer's inputs, [n, T, R].
        missed: see `missed_scores`, [n, T, H].
    """

    def __init__(self, branch: WindowBranch, f: Tensor, missed: Tensor) -> None:
        super().__init__()
        self.branch = [branch]  # in a list: its parameters are not fitted
        weight, const = _regression(f.flatten(0, 1), missed.flatten(0, 1))
        self.share = nn.Parameter(weight)
        self.share_const = nn.Parameter(const)
        self.far_slope = nn.Parameter(torch.ones(branch.heads))
        self.near_slope = nn.Parameter(torch.ones(branch.heads))

    def forward(self, f: Tensor, lse: Tensor) -> Tensor:
        """The share [n, T, H, 1] for components f [n, T, R] and log-sum-exps of the window [n, T, H]."""
        unseen = self.branch[0].unseen(torch.arange(1, f.shape[1] + 1))[None]
        logit = f @ self.share.T + self.share_const - self.near_slope * lse
        logit = logit + self.far_slope * unseen.clamp_min(1).log().unsqueeze(-1)
        return (logit.sigmoid() * (unseen > 0).unsqueeze(-1)).unsqueeze(-1)

    @torch.no_grad()
    def slow(self) -> None:
        """Makes the share grow more slowly with the number of unseen tokens; see the module's docstring."""
        self.share_const.add_(self.far_slope, alpha=(1 - GROWTH) * math.log(KEPT_AT))
        self.far_slope.mul_(GROWTH)

    @torch.no_grad()
    def fold(self, basis: Tensor) -> None:
        """Writes the fitted values into the branch; basis [R, hidden]."""
        branch = self.branch[0]
        branch.share_proj.weight.copy_(self.share @ basis)
        branch.share_proj.bias.copy_(self.share_const)
        branch.slopes.far_slope.copy_(self.far_slope)
        branch.slopes.near_slope.copy_(self.near_slope)


def missed_scores(branch: WindowBranch, q: Tensor, k: Tensor) -> Tensor:
    """Logarithm of the mean exponential of the scores that the window misses: [n, T, H], nan where it misses none.

    Args:
        q, k: [n, T, H, D] and [n, T, key/value heads, D], as softmax attention sees them.
    """
    length, heads = q.shape[1:3]
    states = k.shape[2]
    rows = q.unflatten(2, (states, -1)).permute(0, 2, 3, 1, 4)  # [n, states, H / states, T, D]
    columns = k.permute(0, 2, 3, 1)  # [n, states, D, T]
    mean = q.new_full((len(q), length, heads), torch.nan)
    for start in range(0, length, QUERIES_AT_ONCE):
        stop = min(start + QUERIES_AT_ONCE, length)
        # No other keys are missed by one of these queries.
        first = branch.sinks if branch.family_window is None else max(branch.sinks, start - branch.family_window + 1)
        last = max(first, stop - branch.window)
        query, key = torch.arange(start, stop)[:, None], torch.arange(first, last)
        missed = query // branch.edge * branch.edge - key >= branch.window
        if branch.family_window is not None:
            missed &= query - key < branch.family_window
        count = missed.sum(-1)
        if not bool(count.any()):
            continue
        part = rows[..., start:stop, :]
        scores = ((part * branch.scale).flatten(2, 3) @ columns[..., first:last]).unflatten(2, part.shape[2:4])
        if branch.softcap is not None:
            scores = branch.softcap * (scores / branch.softcap).tanh()
        sums = scores.masked_fill_(~missed, -torch.inf).logsumexp(-1) - count.log()
        sums = sums.masked_fill(count == 0, torch.nan)
        mean[:, start:stop] = sums.flatten(1, 2).transpose(1, 2)
    return mean


def _regression(f: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regression of wanted [N, H] on f [N, R]: weights [H, R] and constants [H]; rows with nan are left out."""
    there = ~wanted.isnan().any(-1)
    if not bool(there.any()):  # every sequence fits into the window
        return f.new_zeros(wanted.shape[1], f.shape[1]), f.new_zeros(wanted.shape[1])
    f, wanted = f[there], wanted[there]
    middle, const = f.mean(0), wanted.mean(0)
    centred = f - middle
    system = centred.T @ centred + RIDGE * len(f) * torch.eye(f.shape[1])
    weight = torch.linalg.solve(system, centred.T @ (wanted - const)).T
    return weight, const - weight @ middle
