"""Fits the parameters that Gated DeltaNet has beyond the teacher's attention to that attention's output.

All rules of the delta family are fitted in the same way, each through its own recurrence; a gate that a rule does not
have is left out, and parameters of its own (`rule_parameters`) are fitted in place.

The teacher's own parameters do not change. Decay, write strength, output gate and the weight of the output norm are
fitted on calibration text: Adam, through the operator, minimises the relative squared error of the layer's output. Two
measures keep the number of steps at some tens:

- The fit starts from a search over a grid of (half-life, write strength), head by head, because the error has basins
  of short and of long memory and a gradient does not cross from one to the other. At each point of the grid, the
  weights of the output channels are the solution of a least squares problem.
- The projections of the gates are fitted in the coordinates of the leading principal components of the layer's input,
  scaled to unit size. Afterwards they are folded back into the projections.

Where the gates have no bias, their constants come from a direction w with w . x ~ 1 for every input x.

Shapes in names and comments: n sequences, T tokens, H query heads, S states, D head size, R components.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer import DeltaRule, MixCall
from deltanet_kernels import gated_rms_norm

from .components import fold_linear, fold_low_rank, principal_components
from .samples import Sample, Samples
from .share_fit import ShareFit

HALF_LIVES = (1.0, 3.0, 8.0, 32.0, 128.0, 1024.0)  # tokens
STRENGTHS = (0.01, 0.05, 0.2, 0.6)
STEPS = 60  # at least; one step per sequence where there are more sequences
RATES = {"A_log": 0.05, "b_const": 0.1, "weight": 0.02, "gate_const": 0.02}  # learning rates by parameter
COMPONENT_RATE = 0.02  # learning rate of the projections
OPEN_GATE = 1.2784645  # silu(OPEN_GATE) = 1
RIDGE = 1e-4  # of least squares, relative to the mean of the diagonal


class GateFit(nn.Module):
    """The fitted parameters of one layer, in the coordinates in which they are fitted.

    Args:
        layer: the layer, with the teacher's weights.
        samples: its samples on the calibration text.
    """

    def __init__(self, layer: DeltaRule, samples: Samples) -> None:
        super().__init__()
        x = samples.x
        self.layer = [layer]  # in a list: its parameters are not fitted
        states, heads, head_dim = layer.num_states, layer.num_heads, layer.head_dim
        self.basis = principal_components(x)  # [R, hidden]
        rank = len(self.basis)
        f = (x @ self.basis.T).flatten(0, 1)
        self.ones = torch.linalg.solve(f.T @ f + RIDGE * len(f) * torch.eye(rank), f.sum(0))  # f . ones ~ 1
        self.A_log = self.a = self.b_const = self.b = None
        if layer.decays != "never":
            self.A_log = nn.Parameter(torch.zeros(states))
        if layer.decays == "by token":
            self.a = nn.Parameter(torch.zeros(states, rank))
        if layer.strengths != "one":
            self.b_const = nn.Parameter(torch.zeros(states))
            self.b = nn.Parameter(torch.zeros(states, rank))
        self.gate = self.gate_const = self.weight = None
        if layer.g_proj is not None:
            self.gate = nn.Parameter(torch.zeros(heads * head_dim, rank))
            self.gate_const = nn.Parameter(torch.full((heads * head_dim,), OPEN_GATE))
        if layer.norm is not None:
            self.weight = nn.Parameter(torch.ones_like(layer.norm.weight))
        self.share: ShareFit | None = None
        if layer.window_branch is not None:
            f = torch.cat([sample.x for sample in samples.kept]) @ self.basis.T
            missed = torch.cat([sample.missed for sample in samples.kept])
            self.share = ShareFit(layer.window_branch, f, missed)
        self.rule_parameters = nn.ParameterList(parameter.requires_grad_() for parameter in layer.rule_parameters())

    def set_memory(self, half_life: Tensor, strength: Tensor) -> None:
        """Sets constant decay and write strength, both [S]; half-life in tokens."""
        # With dt_bias = 0 and a = 0, the decay is exp(A_log) * softplus(0) = exp(A_log) * ln 2 = ln 2 / half-life.
        if self.A_log is not None:
            self.A_log.data.copy_(-half_life.log())
        if self.b_const is not None:
            self.b_const.data.copy_(self.layer[0].strength_logit(strength))

    def grid(self) -> Iterator[tuple[float, float]]:
        """Yields the points (half-life, write strength) of the search; a factor that is not fitted has one value.

        Without erasing, a constant write strength scales the output only.
        """
        strengths = STRENGTHS if self.layer[0].erase != "off" and self.b_const is not None else (0.5,)
        yield from itertools.product(HALF_LIVES if self.A_log is not None else (1.0,), strengths)

    def set_channels(self, weight_HD: Tensor) -> None:
        """Sets the weights of the output channels: in the norm if it has a weight per head, else in the gate."""
        if self.weight is not None and self.weight.shape == weight_HD.shape:
            self.weight.data.copy_(weight_HD)
            return
        size = weight_HD.square().mean().sqrt().clamp_min(1e-6)
        if self.weight is not None:
            self.weight.data.fill_(float(size))
            weight_HD = weight_HD / size
        if self.gate_const is not None:
            self.gate_const.data.copy_(inverse_silu(weight_HD).flatten())

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Computes log decay and write strength, [n, T, S], and output gate logits, [n, T, H, D] or None.

        Args:
            x: [n, T, hidden].
        """
        layer, f = self.layer[0], x @ self.basis.T
        one = torch.ones_like(f[..., :1]) if layer.settings.gate_bias else (f @ self.ones).unsqueeze(-1)
        decay = strength = f
        if self.A_log is None or self.b is None:  # the layer's own, where they are not fitted
            decay, strength = layer.gates(layer.project(x), None)[:2]
            strength = strength[..., -layer.num_states :]  # of several writes per token, the teacher's is the last
        if self.A_log is not None:
            a = f.new_zeros(*f.shape[:2], layer.num_states) if self.a is None else f @ self.a.T
            decay = -self.A_log.exp() * F.softplus(a)
        if self.b is not None and self.b_const is not None:
            strength = layer.strength(f @ self.b.T + one * self.b_const)
        if self.gate is None or self.gate_const is None:
            return decay, strength, None
        gate = f @ self.gate.T + one * self.gate_const
        return decay, strength, gate.unflatten(-1, (layer.num_heads, layer.head_dim))

    def read(self, s: Sample) -> tuple[Tensor, Tensor | None]:
        """Returns the operator's output [n, T, H, D] and the output gate logits."""
        decay, strength, gate = self.gates(s.x)
        layer = self.layer[0]
        return layer.reads(MixCall(s.q, s.k, s.v, (decay, strength, *layer.further_gates(s.x)))), gate

    def heads(self, s: Sample) -> Tensor:
        """Returns the layer's output before o_proj [n, T, H, D]."""
        layer = self.layer[0]
        o, gate = self.read(s)
        if layer.norm is not None and self.weight is not None:
            o = gated_rms_norm(o, gate, self.weight, layer.norm.eps)
        elif gate is not None:
            o = o * F.silu(gate)
        if self.share is not None:
            o = s.window_output + self.share(s.x @ self.basis.T, s.lse) * (o - s.window_output)
        return o

    def forward(self, s: Sample) -> Tensor:
        """Returns the layer's output [n, T, hidden]."""
        return self.layer[0].o_proj(self.heads(s).flatten(-2))  # type: ignore[no-any-return]

    @torch.no_grad()
    def fold(self) -> None:
        """Writes the fitted values into the layer."""
        layer = self.layer[0]
        if self.A_log is not None and self.a is not None:
            layer.decay.A_log.copy_(self.A_log)
            layer.decay.dt_bias.zero_()
            layer.a_proj.weight.copy_(self.a @ self.basis)
        elif self.A_log is not None:
            layer.decay.log_half_life.copy_(-self.A_log)
        if self.b is not None:
            fold_linear(layer.b_proj, self.b, self.b_const, self.basis, self.ones)
        if layer.g_proj is not None and self.gate is not None:
            if layer.g_down is None:
                fold_linear(layer.g_proj, self.gate, self.gate_const, self.basis, self.ones)
            else:
                fold_low_rank(layer.g_down, layer.g_proj, self.gate, self.gate_const, self.basis, self.ones)
        if layer.norm is not None and self.weight is not None:
            layer.norm.weight.copy_(self.weight)
        if self.share is not None:
            self.share.fold(self.basis)


def inverse_silu(y: Tensor) -> Tensor:
    """Returns x >= -1 with silu(x) = y, by Newton's method; y below -0.2 counts as -0.2."""
    y = y.clamp_min(-0.2)
    x = torch.where(y > 0.5, y + 0.3, 2 * y.clamp_max(0.5))
    for _ in range(20):
        s = x.sigmoid()
        x = (x - (x * s - y) / (s * (1 + x * (1 - s))).clamp_min(0.1)).clamp_min(-1.0)
    return x


@torch.no_grad()
def search_memory(fit: GateFit, s: Sample) -> None:
    """Sets each state's half-life and write strength, and each channel's weight, to the best point of the grid.

    If there is no memory to fit, only the weights are set. The error of a head is the squared norm of its difference
    from the teacher's head after o_proj.
    """
    layer = fit.layer[0]
    states, groups = layer.num_states, layer.num_heads // layer.num_states
    best = torch.full((states,), math.inf)
    half_life, strength = torch.ones(states), torch.full((states,), 0.5)
    weight = torch.ones(layer.num_heads, layer.head_dim)
    metric = head_metric(layer)
    share, want = torch.ones(()), s.heads
    if fit.share is not None:  # the state's part of the output, and what is left to it
        share = fit.share(s.x @ fit.basis.T, s.lse)
        want = s.heads - (1 - share) * s.window_output
    for life, beta in fit.grid():
        fit.set_memory(torch.full((states,), life), torch.full((states,), beta))
        o, _ = fit.read(s)
        if layer.norm is not None:
            o = gated_rms_norm(o, None, torch.ones(layer.head_dim), layer.norm.eps)
        error, found = _channel_weights(share * o, want, metric)
        error = error.view(states, groups).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        half_life[better], strength[better] = life, beta
        weight[better.repeat_interleave(groups)] = found[better.repeat_interleave(groups)]
    fit.set_memory(half_life, strength)
    fit.set_channels(weight)


def head_metric(layer: DeltaRule) -> Tensor:
    """The scalar product [H, D, D] in which a head's error is its squared norm after o_proj."""
    columns = layer.o_proj.weight.T.unflatten(0, (layer.num_heads, layer.head_dim))  # [H, D, hidden]
    return columns @ columns.mT


def _channel_weights(o: Tensor, want: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """Returns least squares weights [H, D] of the channels of o, and the remaining squared errors [H].

    Args:
        o: [n, T, H, D]; `want`, its target, has the same shape.
        metric: [H, D, D], the scalar product in which errors are measured.
    """
    o_HND, want_HND = (z.flatten(0, 1).transpose(0, 1) for z in (o, want))
    system = metric * (o_HND.mT @ o_HND)
    ridge = (RIDGE * system.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp_min(1e-20)
    system = system + ridge[:, None, None] * torch.eye(o.shape[-1])
    weight = torch.linalg.solve(system, (o_HND * (want_HND @ metric)).sum(1))
    missed = o_HND * weight.unsqueeze(1) - want_HND
    return ((missed @ metric) * missed).sum((1, 2)), weight


def descend(fit: GateFit, samples: Samples) -> None:
    """Minimises the squared error relative to the teacher's output with Adam, one sequence per step."""
    groups = [
        {"params": [parameter], "lr": 0.0, "peak": RATES.get(name, COMPONENT_RATE)}
        for name, parameter in fit.named_parameters()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    columns = fit.layer[0].o_proj.weight.detach()
    metric = columns.T @ columns  # the scalar product in which the error of all heads is the output's
    size = torch.stack([s.output.square().mean() for s in samples.kept]).mean().clamp_min(1e-30)
    with torch.enable_grad():
        for factor, index in _schedule(len(samples)):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            sample = samples[index]
            missed = (fit.heads(sample) - sample.heads).flatten(-2)
            optimizer.zero_grad()
            # The gradient of (missed @ metric * missed).sum() by one product; autograd would take two through o_proj.
            missed.backward(missed.detach() @ metric * (2 / (sample.output.numel() * size)))
            optimizer.step()


def _schedule(sequences: int) -> Iterator[tuple[float, int]]:
    """Yields (factor of the learning rates, sequence) for each step: five steps of warm-up, a cosine down to 5%."""
    steps = max(STEPS, sequences)
    for step in range(steps):
        factor = min(1.0, (step + 1) / 5) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        yield factor, step % sequences


@torch.no_grad()
def relative_mse(fit: GateFit, samples: Samples) -> float:
    """Squared error of the fitted layer divided by the squared norm of the teacher's output, on `samples.kept`."""
    error = sum(float((fit(s) - s.output).square().sum()) for s in samples.kept)
    return error / max(sum(float(s.output.square().sum()) for s in samples.kept), 1e-30)
