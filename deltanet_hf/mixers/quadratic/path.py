"""PaTH attention in its relaxed form: softmax attention between queries and keys that DeltaNet has turned.

PaTH (arXiv 2505.16381) puts a product of Householder-like matrices between query and key,

    score_ts = q_t^T (I - beta_t w_t w_t^T) ... (I - beta_{s+1} w_{s+1} w_{s+1}^T) k_s

With every beta = 2 and |w| = 1 the factors are reflections, the product from s to t splits into one matrix per token,
and the scores are those of

    q~_t = R_t^T q_t = q_t - DeltaNet(q, w, w)_t        k~_t = k_t - DeltaNet(k, w, w)_t

where DeltaNet(q, k, v)_t = S_t^T q_t with S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T. The layer computes this
second form at every strength. Below 2 it is another function than PaTH. In return, the keys in the cache never change,
where PaTH turns all of them at each token; and the operators are the gated delta rule and softmax attention.

Per key/value head: w = w_proj(x) of unit length, without the paper's short convolution and low rank, and
beta = 1.992 sigmoid(b_proj(x)). The strength ends below 2 because a unit vector that is rounded to bfloat16 may be
longer than 1. Conversion starts with beta = 9e-5 (the bias at -10), where the layer is the teacher's attention up to
about that; the rotary embedding stays. Beside the keys and values the cache holds one state S, [K, K] per key/value
head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer, mixed_cache_layer
from deltanet_hf.mixers.cache.state import MixerCacheLayer, TensorShape
from deltanet_hf.mixers.layer.delta_rule import CLOSED_GATE
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind, Call, Softmax
from deltanet_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

START_LOGIT = -10.0
MAX_STRENGTH = 1.992  # 2 / (1 + 2^-8), see the module's docstring


class Turns(nn.Module):
    """The unit vectors w [B, T, H, D] and the logits of their strengths [B, T, H], from x [B, T, hidden]."""

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.w_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.b_proj = nn.Linear(hidden, heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.w_proj(x).unflatten(-1, (-1, self.head_dim))
        wide = w.to(torch.promote_types(w.dtype, torch.float32))
        unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
        return unit.to(w.dtype), self.b_proj(x)


class RelaxedPath(AttentionKind):
    """Relaxed PaTH attention; see the module's docstring."""

    name: ClassVar[str] = "path"
    title: ClassVar[str] = "relaxed PaTH attention"
    state_beside_keys: ClassVar[bool] = True
    without_lora: ClassVar[tuple[str, ...]] = ("b_proj",)  # one output per head

    turns: Turns

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        self.turns = Turns(hidden, kv_heads, self.head_dim)

    def new_parts(self) -> list[nn.Module]:
        return [self.turns]

    def start_neutral(self, spread: float) -> None:
        nn.init.normal_(self.turns.w_proj.weight, std=spread)
        nn.init.zeros_(self.turns.b_proj.weight)
        nn.init.constant_(self.turns.b_proj.bias, START_LOGIT)

    def place_cache(self, cache: Cache) -> MixedCacheLayer:
        """The state, beside the key/value layer."""
        return mixed_cache_layer(cache, self.layer_idx, {"softmax": None, "state": self.cache_class})

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        return {"state": TensorShape((self.growing_heads, self.head_dim, self.head_dim), torch.float32)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, softmax: Softmax) -> Tensor:
        part: MixerCacheLayer | None = None if call.cache is None else self.place_cache(call.cache).parts["state"]
        if part is not None and part.record_past:
            part.remember(q.shape[2], lambda held, tokens: self._read_again(held, q, k, call, tokens))
        state = part.state["state"] if part is not None and part.is_initialized else None
        q, k, state = self._turned(q, k, call, state, part is not None)
        if call.cache is not None and part is not None and state is not None:
            part.advance(q.shape[2], {"state": state})
            k, v = call.cache.update(k, v, self.layer_idx)
        return softmax(q, k, v, call.mask)

    def _read_again(self, part: MixerCacheLayer, q: Tensor, k: Tensor, call: Call, tokens: int) -> None:
        """Bring the state to the first tokens of a call; their turned keys are in the key/value layer already."""
        padding = None if call.padding is None else call.padding[:, :tokens]
        call = replace(call, x=call.x[:, :tokens], padding=padding)
        state = part.state["state"] if part.is_initialized else None
        _, _, state = self._turned(q[:, :, :tokens], k[:, :, :tokens], call, state, True)
        assert state is not None
        part.advance(tokens, {"state": state})

    def _turned(
        self, q: Tensor, k: Tensor, call: Call, state: Tensor | None, keep_state: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """q~, k~ and the state after the last token, by one call of the delta rule with all queries of a key head."""
        heads = k.shape[1]
        w, b = self.turns(call.x)
        if call.padding is not None:
            b = b.masked_fill(call.padding.unsqueeze(-1), CLOSED_GATE)
        beta = MAX_STRENGTH * b.to(torch.promote_types(b.dtype, torch.float32)).sigmoid()
        both = torch.cat([q.unflatten(1, (heads, -1)), k.unsqueeze(2)], dim=2)  # [B, HK, G + 1, T, D]
        read = both.permute(0, 3, 1, 2, 4).flatten(2, 3)
        w = w.to(read.dtype)
        if call.cu_seqlens is not None:
            read, w, beta = (x.flatten(0, 1).unsqueeze(0) for x in (read, w, beta))
        recurrent = q.shape[2] == 1 and not torch.is_grad_enabled()
        rule = fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule
        output, state = rule(
            read,
            w,
            w,
            torch.zeros_like(beta),
            beta,
            scale=1.0,
            initial_state=None if state is None else state.to(beta.dtype),
            output_final_state=keep_state,
            cu_seqlens=call.cu_seqlens,
        )
        both = both - output.reshape(q.shape[0], q.shape[2], heads, -1, q.shape[3]).permute(0, 2, 3, 1, 4)
        return both[:, :, :-1].flatten(1, 2), both[:, :, -1], state
