"""The Gated DeltaNet layer that takes the place of a decoder layer's softmax attention.

Per head, with a log decay g_t <= 0 and a write strength beta_t in [0, 1] (Gated Delta Networks, arXiv 2412.06464):

    S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - k_t^T exp(g_t) S_{t-1})^T        o_t = D^-0.5 q_t^T S_t

q, k, v come from the teacher's projections; beta = sigmoid(b_proj(x)) and
g = -exp(A_log) softplus(a_proj(x) + dt_bias); the output is RMSNorm(o) * weight * silu(g_proj(x)), through o_proj.
With `householder_steps` n_h > 1 a token writes n_h times before it is read (householder.py).

Shapes in comments: B batch, T tokens, H query heads, HV heads of k, v and state, D head size.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.cache import GatedDeltaNetCacheLayer, cache_layer
from deltanet_hf.config import DeltaNetOptions
from deltanet_hf.householder import HouseholderStep, interleave
from deltanet_hf.padding import padded_tokens
from deltanet_hf.parts import DecayGate, GatedRMSNorm, ShortConv, is_plain
from deltanet_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, gated_delta_step_

CLOSED = -1e4  # a gate logit whose sigmoid and softplus are exactly 0


class GatedDeltaNet(nn.Module):
    """Drop-in for a decoder layer's `self_attn`.

    Built from the attention module that the family's own constructor made: head counts, biases, learned norms and
    the use of rotary embeddings are read off it, so that one class serves every family.

    Args:
        attention: the family's attention module (its weights are not copied; the converter does that).
        config: the model's config, with its `deltanet` entry.
        layer_idx: index of the decoder layer.
    """

    def __init__(self, attention: nn.Module, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        options = DeltaNetOptions.from_dict(config.deltanet)
        self.options, self.layer_idx = options, layer_idx
        self.head_dim: int = attention.head_dim  # type: ignore[assignment]
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_attention_heads if options.expand_kv else config.num_key_value_heads
        # SmolLM3 leaves some layers without positions.
        self.use_rope: bool = options.rope and bool(getattr(attention, "use_rope", True))
        self._rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        hidden, heads, kv_heads, head_dim = config.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim

        fused = getattr(attention, "qkv_proj", None)
        bias = [getattr(fused or getattr(attention, f"{n}_proj"), "bias", None) is not None for n in "qkv"]
        if options.profile == "native":
            bias = [False, False, False]
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=bias[0])
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias[1])
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=bias[2])
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=getattr(attention.o_proj, "bias", None) is not None)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if options.qk_norm and hasattr(attention, "q_norm"):
            q_norm, k_norm = copy.deepcopy(attention.q_norm), copy.deepcopy(attention.k_norm)
            assert isinstance(q_norm, nn.Module)
            assert isinstance(k_norm, nn.Module)
            self.q_norm, self.k_norm = q_norm, k_norm
            self.norms_whole_projection = q_norm.get_parameter("weight").numel() != head_dim
            if self.norms_whole_projection:
                k_norm.weight = nn.Parameter(k_norm.get_parameter("weight").new_ones(kv_heads * head_dim))

        channels = (heads + 2 * kv_heads * options.householder_steps) * head_dim
        self.conv1d = ShortConv(channels, options.conv_size) if options.conv_size else None
        self.a_proj = nn.Linear(hidden, kv_heads, bias=False)
        self.b_proj = nn.Linear(hidden, kv_heads, bias=options.gate_bias)
        self.decay = DecayGate(kv_heads)
        self.householder = nn.ModuleList(
            HouseholderStep(self.k_proj, kv_heads) for _ in range(options.householder_steps - 1)
        )
        self.g_proj = nn.Linear(hidden, heads * head_dim, bias=options.gate_bias) if options.output_gate else None
        self.norm = None
        if options.output_norm != "none":
            shape = (head_dim,) if options.output_norm == "shared" else (heads, head_dim)
            self.norm = GatedRMSNorm(shape, getattr(config, "rms_norm_eps", 1e-6))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _normalise(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        if norm is None:
            return x
        return norm(x) if self.norms_whole_projection else norm(self._split(x)).flatten(-2)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, T, hidden] -> q [B, T, H*D], k, v [B, T, HV*D], through the learned norms."""
        q, k = self._normalise(self.q_proj(x), self.q_norm), self._normalise(self.k_proj(x), self.k_norm)
        v = self.v_proj(x)
        return q.to(v.dtype), k.to(v.dtype), v  # under autocast learned norms give float32

    def _heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position_embeddings: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self._split(q), self._split(k), self._split(v)
        if self.use_rope:
            cos, sin = position_embeddings
            q, k = self._rotate(q, k, cos, sin, unsqueeze_dim=2)
            q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast cos and sin may be wider than the projections
        return q, k, v

    def project_qkv(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, T, H, D], k, v [B, T, HV, D] as softmax attention would see them: no convolution, no activation."""
        return self._heads(*self._project(hidden_states), position_embeddings)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], None).

        Where there is an `attention_mask` (2D or 4D), padding is read from it, or from `padding` ([B, T] bool, True at
        padding), which `announce_padding` took from the same mask. Packed sequences come from `cu_seq_lens_q` ([N + 1]
        boundaries over the B*T tokens), the state from `past_key_values`, whose layer it replaces by its own.
        """
        batch, length, _ = hidden_states.shape
        cache = None if past_key_values is None else cache_layer(past_key_values, self.layer_idx)
        if attention_mask is None:
            padding = None
        elif padding is None:
            padding = padded_tokens(attention_mask, length, 0 if cache is None else cache.get_seq_length())
        if length == 1 and cache is not None and self._can_step(cache):
            return self._step(hidden_states, position_embeddings, cache, padding), None
        x = hidden_states if padding is None else hidden_states.masked_fill(padding.unsqueeze(-1), 0.0)

        q, k, v = self._project(x)
        a, b = self.a_proj(x), self.b_proj(x)
        if self.householder:
            k, v, b = self._before(k, v, b, x)
        packed = cu_seq_lens_q is not None and length > 1
        state = None if cache is None or not cache.is_initialized else cache.state
        if packed and cache is not None:
            raise ValueError("cu_seq_lens_q: packed sequences leave no state to continue from; pass use_cache=False")
        conv_tail = None
        if self.conv1d is not None:
            parts = [q, k, v]
            if padding is not None:  # biases made padding non-zero again
                parts = [part.masked_fill(padding.unsqueeze(-1), 0.0) for part in parts]
            (q, k, v), conv_tail = self._convolve(parts, cache, cu_seq_lens_q if packed else None)
        q, k, v = self._heads(q, k, v, position_embeddings)
        if self.options.qk_activation == "silu":
            q, k = F.silu(q), F.silu(k)
        if self.options.v_activation == "silu":
            v = F.silu(v)

        if padding is not None:
            a, b = (gate.masked_fill(padding.unsqueeze(-1), CLOSED) for gate in (a, b))
        inputs: list[torch.Tensor] = [q, k, v, self.decay(a), b.float().sigmoid()]
        cu_seqlens, steps = cu_seq_lens_q if packed else None, self.options.householder_steps
        if steps > 1:
            inputs = interleave(*inputs)
            cu_seqlens = None if cu_seqlens is None else cu_seqlens * steps
        if packed:
            inputs = [tensor.flatten(0, 1).unsqueeze(0) for tensor in inputs]
        decoding = length == 1 and not torch.is_grad_enabled()
        rule = fused_recurrent_gated_delta_rule if decoding else chunk_gated_delta_rule
        q, k, v, g, beta = inputs
        output, state = rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        if steps > 1:
            output = output[:, steps - 1 :: steps]
        output = output.view(batch, length, self.num_heads, self.head_dim)
        if cache is not None:
            assert state is not None
            cache.advance(length, state, conv_tail)
        return self._project_out(output, x), None

    def _before(
        self, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k, v [B, T, HV*D] and b [B, T, HV] behind those of the new steps: [B, T, n_h*HV*D], [B, T, n_h*HV]."""
        for step in self.householder:
            k_new, v_new, b_new = step(x)
            k = torch.cat([self._normalise(k_new, self.k_norm).to(k.dtype), k], dim=-1)
            v, b = torch.cat([v_new, v], dim=-1), torch.cat([b_new, b], dim=-1)
        return k, v, b

    def _can_step(self, cache: GatedDeltaNetCacheLayer) -> bool:
        """Whether the fused step may read the parameters of its parts and change the cache's tensors in place."""
        if self.householder or torch.is_grad_enabled() or cache.state is None or not cache.is_initialized:
            return False
        parts = [self.decay] + [part for part in (self.norm, self.conv1d) if part is not None]
        if not all(is_plain(part) for part in parts) or cache.state.requires_grad:
            return False
        # A state made in inference mode can only be changed there.
        return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not cache.state.is_inference()

    def _step(
        self,
        x: torch.Tensor,
        position_embeddings: Any,
        cache: GatedDeltaNetCacheLayer,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """The forward pass of one more token: x [B, 1, hidden] -> [B, 1, hidden]. The cache moves on in place."""
        assert cache.state is not None
        q, k, v = self._project(x)
        conv_weight = conv_tail = cos = sin = None
        if self.conv1d is not None:
            conv_weight, conv_tail = self.conv1d.weight.squeeze(1), cache.conv_tail
        if self.use_rope:  # every family's `apply_rotary_pos_emb` turns the halves of the leading channels
            cos, sin = position_embeddings
        output = gated_delta_step_(
            q,
            k,
            v,
            self.a_proj(x),
            self.b_proj(x),
            cache.state,
            self.decay.A_log,
            self.decay.dt_bias,
            conv_weight,
            conv_tail,
            None if self.g_proj is None else self.g_proj(x),
            None if self.norm is None else self.norm.weight,
            padding,
            cos,
            sin,
            eps=1e-6 if self.norm is None else self.norm.eps,
            qk_silu=self.options.qk_activation == "silu",
            v_silu=self.options.v_activation == "silu",
        )
        cache.tokens_seen += 1
        return self.o_proj(output.flatten(-2))

    def _convolve(
        self, parts: list[torch.Tensor], cache: GatedDeltaNetCacheLayer | None, cu_seqlens: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The short convolution over q, k, v [B, T, C_i], continuing from the cache's tail."""
        assert self.conv1d is not None
        if cu_seqlens is not None:
            flat, _ = self.conv1d([part.flatten(0, 1).unsqueeze(0) for part in parts], None, False, cu_seqlens)
            return [x.view_as(part) for x, part in zip(flat, parts, strict=True)], None
        tail = cache.conv_tail if cache is not None and cache.is_initialized else None
        return self.conv1d(parts, tail, cache is not None, None)

    def _project_out(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Gated norm and output projection: output [B, T, H, D], x [B, T, hidden] -> [B, T, hidden]."""
        gate = None if self.g_proj is None else self._split(self.g_proj(x))
        if self.norm is not None:
            output = self.norm(output, gate)
        elif gate is not None:
            output = output * F.silu(gate)
        return self.o_proj(output.flatten(-2))
