"""Softmax attention whose scores fall with the distance: forgetting attention and ALiBi.

Per query head, with a log decay log f_t <= 0 per token and F_t = log f_1 + ... + log f_t,

    o_t = sum over s <= t of softmax_s(scale q_t . k_s + F_t - F_s) v_s

Forgetting attention (FoX, the Forgetting Transformer, arXiv 2503.02130) computes the decay from the layer's input:
log f_t = -opening * softplus(-f_proj(x_t)) with one opening >= 0 per head. At opening 0 nothing is forgotten, which is
the teacher's attention; at 1 it is the paper's f_t = sigmoid(f_proj(x_t)). Linear biases (ALiBi, arXiv 2108.12409) are
the constant log f = -slope, so that F_t - F_s = -slope (t - s), where padding does not count. The paper's slopes are
fixed, 2^(-8 h / H) for h = 1 .. H; here they are trained and start at 0, the teacher's attention. The rotary embedding,
which both papers leave out, stays.

F_t is the same for all keys of a query and cancels in the softmax. So -F_s becomes further channels of the keys, which
a constant in the query reads: any softmax kernel computes it, and the cached keys carry it. Sequences packed into a row
or padded on the left need no F of their own for the same reason.

F is float32. In bfloat16 one channel would round it to 1/256 of its value, which is 3 for F = -800; three channels
that add up hold all 24 bits, and the kernels add products of two 16-bit numbers in float32. In the backward pass of a
16-bit kernel, the gradient of each F_s is rounded once to that dtype.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.layer.parts import Opening
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind, Call, Softmax
from deltanet_kernels import cumulative_sum

ALIGNMENT = 8  # kernels want head sizes that are multiples of it
UNIT = 64.0  # about -F where a channel is 1, so that float16 holds F down to -4e6


class DecayBias(AttentionKind):
    """Base of the kinds with a log decay per query head; a subclass defines `log_decay`."""

    fp32: ClassVar[tuple[str, ...]] = ("opening",)

    def log_decay(self, x: Tensor) -> Tensor:
        """log f <= 0 of the tokens x [B, T, hidden]: [B, T, HQ], float32 or float64."""
        raise NotImplementedError

    def extra_channels(self, dtype: torch.dtype) -> int:
        groups = int(self.config.num_attention_heads) // int(self.config.num_key_value_heads)
        used = self.head_dim + _parts(dtype) * groups
        return -(-used // ALIGNMENT) * ALIGNMENT - self.head_dim

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, softmax: Softmax) -> Tensor:
        heads, groups, parts = k.shape[1], q.shape[1] // k.shape[1], _parts(k.dtype)
        log_f = self.log_decay(call.x)
        if call.padding is not None:
            log_f = log_f.masked_fill(call.padding.unsqueeze(-1), 0.0)
        total = cumulative_sum(log_f).unflatten(2, (heads, groups)).transpose(1, 2)  # F [B, HK, T, G]
        constant = 2.0 ** round(math.log2(UNIT / softmax.scaling))  # a power of two is exact in every dtype
        unit = constant * softmax.scaling
        held = self.held(call.cache)
        if held is not None:
            before = held.keys[..., self.head_dim : self.head_dim + parts * groups]
            if as_cache_layer(held).in_order:
                before = before[:, :, -1:]
            before = before.to(total.dtype).unflatten(-1, (parts, groups)).sum(-2)
            # Elsewhere the last token is the one with the least F, which never rises.
            total = total - unit * before.amax(2, keepdim=True)
        room = self.extra_channels(k.dtype) - parts * groups
        read = torch.eye(groups, dtype=q.dtype, device=q.device).repeat(heads, parts) * constant  # [HQ, parts * G]
        q = torch.cat([q, F.pad(read, (0, room))[:, None].expand(*q.shape[:3], -1)], dim=-1)
        k = torch.cat([k, F.pad(split(total / -unit, k.dtype), (0, room))], dim=-1)
        if call.cache is not None:
            k, v = call.cache.update(k, v, self.layer_idx)
        return softmax(q, k, v, call.mask)


class ForgetGate(nn.Module):
    """log f [B, T, H] <= 0, float32 or float64, from the layer's input x [B, T, hidden]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.f_proj = nn.Linear(hidden, heads)
        self.opening = Opening(heads)

    def forward(self, x: Tensor) -> Tensor:
        opening = self.opening()
        return -opening * F.softplus(-self.f_proj(x).to(opening.dtype))


class ForgettingAttention(DecayBias):
    """Softmax attention with a forget gate."""

    name: ClassVar[str] = "fox"
    title: ClassVar[str] = "forgetting attention"
    without_lora: ClassVar[tuple[str, ...]] = ("f_proj",)  # one output per head

    forget: ForgetGate

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.forget = ForgetGate(hidden, query_heads)

    def new_parts(self) -> list[nn.Module]:
        return [self.forget]

    def start_neutral(self, spread: float) -> None:
        """The opening has a gradient; the gate's projection has one as soon as the opening is above 0."""
        self.forget.opening.reset_parameters()
        nn.init.zeros_(self.forget.f_proj.weight)
        nn.init.zeros_(self.forget.f_proj.bias)

    def log_decay(self, x: Tensor) -> Tensor:
        return self.forget(x)  # type: ignore[no-any-return]


class LinearBiasAttention(DecayBias):
    """Softmax attention with linear biases; `slope.opening` [HQ] are the slopes."""

    name: ClassVar[str] = "alibi"
    title: ClassVar[str] = "attention with linear biases"

    slope: Opening

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.slope = Opening(query_heads)

    def new_parts(self) -> list[nn.Module]:
        return [self.slope]

    def start_neutral(self, spread: float) -> None:
        self.slope.reset_parameters()

    def log_decay(self, x: Tensor) -> Tensor:
        return -self.slope().expand(*x.shape[:2], -1)


def split(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers x [..., E] as channels [..., parts * E] of `dtype`, whose parts add up to x: one, or three of 16 bits.

    The gradient is that of the first part. Each part takes the leading bits of what is left: a cast to 16 bits and back
    would leave nothing for the next part where torch.compile leaves such pairs of casts out.
    """
    parts = _parts(dtype)
    if parts == 1:
        return x.to(dtype)
    x, channels = x.float(), []
    for _ in range(parts):
        rest = x.detach() - _leading_bits(x.detach(), dtype)
        channels.append((x - rest).to(dtype))
        x = rest
    return torch.cat(channels, dim=-1)


def _leading_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers without the bits of the mantissa that a 16-bit `dtype` does not have."""
    return (x.view(torch.int32) & -(1 << (16 if dtype == torch.bfloat16 else 13))).view(torch.float32)


def _parts(dtype: torch.dtype) -> int:
    return 3 if dtype.itemsize < 4 else 1
