"""A softmax model whose key/value heads have gates, and the bytes that they leave.

A gate is a linear map of the layer's input, at length 1, to a number per key/value head; it begins at `OPEN`. In
training a token is kept to the share sigmoid((number + noise) / `TEMPERATURE`) with logistic noise, which is nearly 0
or 1; otherwise it is kept if its number is above a threshold.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.quantised_cache_spec import held_bytes
from deltanet_hf.model_sizes import head_size
from deltanet_kernels.packed_cache.layout import SINKS
from measuring.eviction.attention import EVICTED, Reach, evicting_attention

WINDOW = 256  # tokens after which a gate decides, in the heads that have gates
OPEN, TEMPERATURE = 5.0, 0.1  # as in the code that its authors published
BITS = 4
NAME = "learned_eviction"  # under which the families' attention finds `_attend`


@dataclass(frozen=True)
class Heads:
    """The tokens that each key/value head of a model sees.

    Attributes:
        windows: tokens in any case [L][HK].
        gated: whether older tokens are kept by gates, or dropped [L][HK].
        size: channels of a head.
    """

    windows: Sequence[Sequence[int]]
    gated: Sequence[Sequence[bool]]
    size: int

    @classmethod
    def of(cls, config: Any, chosen: Sequence[tuple[int, int]] | None = None, windows: Sequence[int] = ()) -> Heads:
        """All heads with gates; or those of `chosen` (layer, head), the others with the windows of their layers."""
        layers, heads = range(config.num_hidden_layers), range(config.num_key_value_heads)
        gated = [[chosen is None or (layer, head) in chosen for head in heads] for layer in layers]
        reach = [[WINDOW if gate else windows[layer] for gate in gated[layer]] for layer in layers]
        return cls(reach, gated, head_size(config))

    def bytes(self, tokens: int, share: float) -> int:
        """Bytes of a sequence whose gates keep `share` of the tokens that are older than the window."""
        total = 0
        for window, gate in zip(chain(*self.windows), chain(*self.gated), strict=True):
            older = max(0, tokens - window - SINKS)
            held = min(tokens, window + SINKS + round(share * older)) if gate else tokens
            reach = (None, 0) if gate else (window, SINKS)
            total += held_bytes(1, self.size, held, BITS, torch.bfloat16, *reach)
        return total

    def share(self, budget: int, tokens: int) -> float:
        """The share with which a sequence of `tokens` tokens takes at most `budget` bytes; UserError if none does."""
        steps = 10_000
        found = bisect.bisect_right(range(steps + 1), budget, key=lambda step: self.bytes(tokens, step / steps))
        if not 1 < found <= steps:
            bounds = [f"{self.bytes(tokens, share) / 1e6:.1f}" for share in (0, 1)]
            raise UserError(f"--keep: at {tokens:,} tokens gates leave {' to '.join(bounds)} MB; give a budget between")
        return (found - 1) / steps


class Gates(nn.Module):
    """The gates of a model, whose attention they take over; the model is changed in place.

    Attributes:
        training: whether tokens are kept to a share, with noise, or by the threshold.
        threshold: of numbers, above which a token is kept.
        kept: the mean share of tokens that the gates kept in the last call, a tensor [] with gradients in training.
        numbers: those of the last call, [B, n, T] of the n heads of each layer that have gates.
    """

    def __init__(self, model: PreTrainedModel, heads: Heads) -> None:
        super().__init__()
        self.heads, self.threshold = heads, 0.0
        self.numbers: list[Tensor] = []
        config: Any = model.config
        decoder: Any = model.model
        self.maps = nn.ModuleList()
        self._shares: list[Tensor] = []
        self._gated: list[Tensor] = []
        for layer, (windows, gated) in enumerate(zip(heads.windows, heads.gated, strict=True)):
            linear = nn.Linear(config.hidden_size, len(gated), device=model.device, dtype=torch.float32)
            nn.init.zeros_(linear.weight)
            nn.init.constant_(linear.bias, OPEN)
            self.maps.append(linear)
            attention = decoder.layers[layer].self_attn
            mask = torch.tensor(gated, device=model.device)
            self._gated.append(mask.nonzero()[:, 0])  # a mask would make the host wait in every call
            attention.reach = Reach(torch.tensor(windows, device=model.device), mask)
            attention.register_forward_pre_hook(self._look, with_kwargs=True)
        config._attn_implementation = NAME

    @property
    def kept(self) -> Tensor:
        count = sum(map(sum, self.heads.gated))
        return torch.stack(self._shares).sum() / count

    def _look(self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer, x = attention.layer_idx, kwargs["hidden_states"]
        if layer == 0:
            self._shares, self.numbers = [], []
        numbers = self.maps[layer](F.normalize(x.float(), dim=-1)).mT  # [B, HK, T]
        if self.training:
            noise = torch.logit(torch.rand_like(numbers), eps=1e-6)
            attention.log_gates = F.logsigmoid((numbers + noise) / TEMPERATURE)
        else:
            attention.log_gates = (numbers <= self.threshold) * EVICTED
        gated = self._gated[layer]
        self._shares.append(attention.log_gates[:, gated].exp().mean((0, 2)).sum())
        self.numbers.append(numbers[:, gated].detach())


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that a family's attention calls in the place of SDPA."""
    if attention_mask is not None or any(kwargs.get(name) for name in ("sliding_window", "softcap")):
        raise UserError("learned eviction is measured without padding, in models without sliding windows and soft caps")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = evicting_attention(query, key, value, module.log_gates, module.reach, scale)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
