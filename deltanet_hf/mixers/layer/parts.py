"""The parts of a mixer that have parameters of their own, each called as a module; linear layers with one input.

PEFT's `modules_to_save` and offloading act on modules that are called, so a mixer does not read the parameters of its
parts itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer.token_order import padding_last, reordered
from deltanet_kernels import causal_conv1d, gated_rms_norm

ALIGNMENT = 8  # numbers of outputs that matrix products are fast for are multiples of it


class Part(nn.Module):
    """Base of the parts; each defines the values that its parameters begin with."""

    def reset_parameters(self) -> None:
        raise NotImplementedError


class ShortConv(Part):
    """Causal depthwise convolution over time; `weight` [channels, 1, taps], the last tap on the current token."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """An exact identity: the only start that leaves a converted model as it was."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight[..., -1] = 1.0

    def forward(
        self,
        parts: Sequence[torch.Tensor],
        padding: torch.Tensor | None,
        tail: torch.Tensor | None,
        output_tail: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Convolve parts [B, T, C_i] of the channels C, continuing from tail [B, C, taps - 1] (None: zeros).

        Padding ([B, T] bool) is skipped wherever it lies, so that a row gives what its tokens alone give.
        `cu_seqlens` are the boundaries of packed sequences over the B*T tokens; padding in them counts as zeros.
        Returns the same shapes; the new tail is None unless `output_tail`. The parts are convolved one by one, because
        joining them would copy them forward and backward.
        """
        shapes = [part.shape for part in parts]
        if padding is not None:  # biases made padding non-zero again
            parts = [part.masked_fill(padding.unsqueeze(-1), 0.0) for part in parts]
        if cu_seqlens is not None:
            parts = [part.flatten(0, 1).unsqueeze(0) for part in parts]
        sizes = [shape[-1] for shape in shapes]
        weights = self.weight.squeeze(1).split(sizes)
        tails = [None] * len(parts) if tail is None else tail.split(sizes, dim=1)
        skipped = None if padding is None or cu_seqlens is not None else _Skipped(padding.expand(shapes[0][:2]))
        outputs, ends = [], []
        for x, taps, before, shape in zip(parts, weights, tails, shapes, strict=True):
            if skipped is not None:
                y, end = skipped.convolve(x, taps, before, output_tail)
            else:
                y, end = causal_conv1d(x, taps, None, None, before, output_tail, cu_seqlens)
            outputs.append(y.view(shape))
            ends.append(end)
        return outputs, torch.cat([end for end in ends if end is not None], dim=1) if output_tail else None


class _Skipped:
    """Convolves the tokens of rows with padding [B, T] as if they stood behind one another."""

    def __init__(self, padding: torch.Tensor) -> None:
        self.order, self.place = padding_last(padding)
        self.tokens = (~padding).sum(1)

    def convolve(
        self, x: torch.Tensor, taps: torch.Tensor, tail: torch.Tensor | None, output_tail: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `causal_conv1d` of x [B, T, C]; outputs at padding have no meaning."""
        x = reordered(x, self.order)
        y, _ = causal_conv1d(x, taps, None, None, tail)
        end = None
        if output_tail:
            size = taps.shape[1] - 1
            inputs = F.pad(x, (0, 0, size, 0)) if tail is None else torch.cat([tail.to(x.dtype).mT, x], dim=1)
            last = self.tokens[:, None] + torch.arange(size, device=x.device)
            end = reordered(inputs, last).mT
        return reordered(y, self.place), end


class KeyOffset(Part):
    """Centres the keys of each head: subtracts `weight` [HK, D] from them.

    Softmax attention is the same for any offset, because all scores of a query move alike. A state is not: a direction
    that all keys share lets each of them read what was written under the others.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, k: torch.Tensor) -> torch.Tensor:
        """k [B, T, n*HK, D] -> the same; the n writes per token of a head share its offset."""
        heads = len(self.weight)
        return (k.unflatten(2, (-1, heads)) - self.weight.to(k.dtype)).flatten(2, 3)


class DecayGate(Part):
    """Log decay per head: g = -exp(A_log) * softplus(a + dt_bias), all in float32 (Mamba-2, arXiv 2405.21060)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start of training from scratch: exp(A_log) evenly spread over 1..16, steps over 1e-3..1e-1."""
        heads = self.A_log.numel()
        with torch.no_grad():
            self.A_log.copy_(torch.linspace(1.0, 16.0, heads, device=self.A_log.device).log())
            step = torch.logspace(-3, -1, heads, device=self.dt_bias.device)
            self.dt_bias.copy_(step.expm1().log())

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        """a [B, T, HV] -> g [B, T, HV] float32, <= 0."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())


class Opening(Part):
    """A number per head, `opening` [H], that starts at 0 and counts as the nearest one between 0 and `limit`.

    The gradient is that of the number itself, also outside of the range, so that training can bring it back.
    """

    def __init__(self, heads: int, limit: float = math.inf) -> None:
        super().__init__()
        self.limit = limit
        self.opening = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.opening)

    def forward(self) -> torch.Tensor:
        """[H], float32 or float64."""
        x = self.opening.to(torch.promote_types(self.opening.dtype, torch.float32))
        return x + (x.clamp(0.0, self.limit) - x).detach()


class GatedRMSNorm(Part):
    """RMSNorm over each head's output, times SiLU of the gate; `weight` [D], or [HO, D] for a weight per head."""

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.eps = eps

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """x, gate [B, T, HO, D] -> [B, T, HO, D]."""
        return gated_rms_norm(x, gate, self.weight, self.eps)


def linear_products(x: torch.Tensor, linears: Sequence[nn.Module | None]) -> list[torch.Tensor | None]:
    """The outputs [..., out] of linear layers for x [..., in], in order; None for a missing one.

    With gradients, layers of few outputs, one per head, are one product: apart, the three of a layer take 4% of a
    training step of SmolLM2-135M.
    """
    narrow = [one for one in linears if type(one) is nn.Linear and one.out_features % ALIGNMENT and _is_bare(one)]
    if len(narrow) < 2 or not torch.is_grad_enabled():
        return [None if one is None else one(x) for one in linears]
    sizes = [one.out_features for one in narrow]
    rest = -sum(sizes) % ALIGNMENT
    biases: list[torch.Tensor] = [
        one.weight.new_zeros(one.out_features) if one.bias is None else one.bias for one in narrow
    ]
    weight = F.pad(torch.cat([one.weight for one in narrow]), (0, 0, 0, rest))
    product = F.linear(x, weight, F.pad(torch.cat(biases), (0, rest))).split([*sizes, rest], -1)
    found = dict(zip(narrow, product, strict=False))
    return [None if one is None else found[one] if one in found else one(x) for one in linears]


def _is_bare(linear: nn.Linear) -> bool:
    """Whether nothing has been put around the call of a layer: hooks, or another forward (offloading)."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return "forward" not in linear.__dict__ and not any(hooks)
