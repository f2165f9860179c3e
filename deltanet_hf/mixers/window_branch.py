"""Softmax attention over a sliding window and attention sinks, beside the recurrent state of the same layer.

For token t and head h, with w_t the softmax attention to the last `window` and the first `sinks` tokens of the sequence
and o_t the state's output behind its norm and gate,

    y_t = (1 - s_t) w_t + s_t o_t        s_t = sigmoid(share_proj(x_t) + far_slope log f_t - near_slope log Z_t)

where Z_t is the sum of exponentials that normalises w_t and f_t the number of earlier tokens that the window does not
see; s_t = 0 while f_t = 0. If o_t were the softmax attention to those f_t tokens, with the sum of exponentials F_t,
then y_t would be the complete softmax attention for s_t = F_t / (F_t + Z_t), whose logit is
log(F_t / f_t) + log f_t - log Z_t. So both slopes begin at 1, and `share_proj` predicts the logarithm of the mean
exponential of what the window misses.
As long as a sequence fits into window and sinks, the layer is the teacher's attention. Scores are capped where the
teacher's are (Gemma 2).

Shapes: B batch, T tokens of a call, H query heads, HK key/value heads, D head size, S = sinks + window places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deltanet_hf.mixers.attention_shape import AttentionShape, MixerProjections
from deltanet_hf.mixers.fake_quantisation import quantised_attention
from deltanet_hf.mixers.layer_kind import TensorShape
from deltanet_hf.mixers.parts import GatedRMSNorm, Part, is_plain
from deltanet_hf.mixers.prompt import without_gradients
from deltanet_hf.mixers.state import State
from deltanet_hf.mixers.token_order import few_queries, in_order
from deltanet_hf.mixers.window_cache import KeptTokens, Tokens
from deltanet_kernels import window_attention, window_keep, window_mixture, window_step_
from deltanet_kernels.window.calls import WindowCall, WindowKeepCall, WindowMixtureCall


class ShareSlopes(Part):
    """The slopes of the share's logit, per head; float32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.far_slope = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.near_slope = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The values of complete softmax attention; see the module's docstring."""
        nn.init.ones_(self.far_slope)
        nn.init.ones_(self.near_slope)

    def forward(self, unseen: Tensor, lse: Tensor) -> Tensor:
        """unseen [B, T] (at least 1), lse [B, T, H] float32 -> [B, T, H] float32."""
        return self.far_slope.float() * unseen.float().log().unsqueeze(-1) - self.near_slope.float() * lse


class WindowBranch(Part):
    """See the module's docstring.

    Args:
        shape: the attention that the layer replaces.
        settings: the mixer's settings, with `window` >= 1.
    """

    FP32 = ("far_slope", "near_slope")
    STATE = ("keys", "values", "numbers", "count")
    dropout: Tensor
    cache_bits: int = 16  # of the keys and values, see `deltanet_hf/models/cache_bits.py`

    def __init__(self, shape: AttentionShape, settings: MixerProjections) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_q_heads, shape.num_v_heads // shape.kv_repeats
        self.head_dim = shape.head_dim
        self.scale = shape.head_dim**-0.5 if shape.scaling is None else float(shape.scaling)
        self.softcap = None if shape.softcap is None else float(shape.softcap)
        self.family_window = shape.family_window
        self.window, self.sinks = settings.window, settings.sinks
        if shape.family_window is not None:  # the teacher's own sliding window loses the sinks too
            self.window, self.sinks = min(settings.window, shape.family_window), 0
        self.share_proj = nn.Linear(shape.hidden_size, self.heads)
        self.slopes = ShareSlopes(self.heads)
        # Probability of leaving out the window of a row in training; a tensor, so that captured graphs read it.
        self.register_buffer("dropout", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """No dropout: loading a model leaves buffers that are not saved without a value."""
        self.dropout.zero_()

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        """The window's part of the layer's state."""
        places = self.window + self.sinks
        return {
            "keys": TensorShape((self.kv_heads, places, self.head_dim), dtype),
            "values": TensorShape((self.kv_heads, places, self.head_dim), dtype),
            "numbers": TensorShape((places,), torch.int32),
            "count": TensorShape((), torch.int32),
        }

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        far: Tensor,
        padding: Tensor | None,
        state: State | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State]:
        """The layer's output before `o_proj`, and the window's part of the new state (empty unless `keep_state`).

        Args:
            x: the layer's input [B, T, hidden].
            q, k, v: [B, T, H, D], [B, T, HK, D], [B, T, HK, D] as softmax attention sees them.
            far: [B, T, H, D], the state's output behind its norm and gate.
            padding, state, keep_state, cu_seqlens: as in `Mixer.mix`.
        """
        tokens = self._tokens(x, padding, state, cu_seqlens)
        near, lse, new_state = self._near(q, k, v, padding, state, keep_state, cu_seqlens, tokens)
        share = self.share(x, lse, tokens.numbers).unsqueeze(-1)
        return near + share.to(near.dtype) * (far.to(near.dtype) - near), new_state

    def mixes_in_one_kernel(self, norm: GatedRMSNorm | None) -> bool:
        """Whether `mixed` computes what the norm of the state's output and `forward` do in this call."""
        plain = self.can_step() and self.cache_bits == 16
        return without_gradients() and plain and (norm is None or is_plain(norm))

    def mixed(
        self,
        x: Tensor,
        share: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        far: Tensor,
        gate: Tensor | None,
        norm: GatedRMSNorm | None,
        padding: Tensor | None,
        state: State | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, State]:
        """As `forward`, with the share, the mixture and the state's norm and gate [B, T, H, D] in one kernel.

        Called where `mixes_in_one_kernel`; `far` is the state's output before norm and gate, `share` what `share_proj`
        gives for x, where that is known.
        """
        if state is None and padding is None and cu_seqlens is None:  # the sequence begins here
            window = WindowCall(q, k, v, self.window, self.sinks, self.scale, None, self.softcap)
            near, lse = window_attention.unchecked(window)
            keep = WindowKeepCall(k, v, self.window, self.sinks)
            kept = window_keep.unchecked(keep) if keep_state else ()
            numbers, new_state = None, dict(zip(self.STATE, kept, strict=False))
        else:
            tokens = self._tokens(x, padding, state, cu_seqlens)
            near, lse, new_state = self._near(q, k, v, padding, state, keep_state, cu_seqlens, tokens)
            numbers = tokens.numbers
        slopes: Any = self.slopes._parameters  # quicker than the attributes of a module
        call = WindowMixtureCall(
            near,
            lse,
            far,
            self.share_proj(x) if share is None else share,
            slopes["far_slope"],
            slopes["near_slope"],
            self.window + self.sinks,
            self.family_window,
            numbers,
            gate,
            None if norm is None else norm.weight,
            1e-6 if norm is None else norm.eps,
        )
        return window_mixture.unchecked(call), new_state

    def _tokens(self, x: Tensor, padding: Tensor | None, state: State | None, cu_seqlens: Tensor | None) -> Tokens:
        batch, length = x.shape[:2]
        before = None if state is None else state["count"]
        return Tokens.of(batch, length, padding, cu_seqlens, before, x.device)

    def _near(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None,
        state: State | None,
        keep_state: bool,
        cu_seqlens: Tensor | None,
        tokens: Tokens,
    ) -> tuple[Tensor, Tensor, State]:
        """The attention, w [B, T, H, D] and log Z [B, T, H] float32, and the window's part of the new state."""
        if cu_seqlens is not None or (state is None and padding is None and not keep_state):
            return *self.attend(q, k, v, cu_seqlens), {}
        own = {} if state is None else {name: state[name] for name in self.STATE}
        kept = KeptTokens(self.window, self.sinks, own, tokens)
        keys, values = kept.update(k.transpose(1, 2), v.transpose(1, 2), 0)
        if state is None and padding is None:
            near, lse = self.attend(q, k, v, None)
        else:
            near, lse = self._attend_kept(q, keys.transpose(1, 2), values.transpose(1, 2), tokens, kept.seen)
        return near, lse, kept.state

    def can_step(self) -> bool:
        """Whether `step` computes what `forward` does: nothing is dropped, replaced or hooked."""
        replaced = "share" in self.__dict__ or "forward" in self.__dict__
        hooked = self._forward_pre_hooks or self._forward_hooks
        return not self.training and not replaced and not hooked and is_plain(self.slopes)

    def step(
        self,
        share: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        far: Tensor,
        state: State,
        padding: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        """One more token by one kernel, with the window's part of `state` changed in place.

        Called without gradients, where `can_step`. Shapes are those of `forward` with T = 1; outputs at padding are 0.

        Args:
            share: the output of `share_proj` [B, 1, H].
            q, k, v: before the rotary embedding of cos and sin, [B or 1, 1, R] each, or without one.
        """
        slope = torch.promote_types(q.dtype, torch.float32)
        return window_step_(
            q,
            k,
            v,
            self.window,
            self.sinks,
            state["keys"],
            state["values"],
            state["numbers"],
            state["count"],
            share,
            far,
            self.slopes.far_slope.to(slope),
            self.slopes.near_slope.to(slope),
            self.family_window,
            self.scale,
            padding,
            self.softcap,
            cos,
            sin,
        )

    def share(self, x: Tensor, lse: Tensor, numbers: Tensor) -> Tensor:
        """The state's share [B, T, H] float32 of the output.

        Args:
            x: [B, T, hidden]; lse: log Z [B, T, H] float32; numbers: of the tokens, [B, T] or [1, T], from 1.
        """
        unseen = self.unseen(numbers)
        logit = self.share_proj(x).float() + self.slopes(unseen.clamp_min(1), lse)
        share = logit.sigmoid() * (unseen > 0).unsqueeze(-1)
        if self.training:
            dropped = torch.rand(x.shape[0], 1, 1, device=x.device) < self.dropout
            share = torch.where(dropped, 1.0, share)
        return share

    def unseen(self, numbers: Tensor) -> Tensor:
        """Number of earlier tokens that the teacher's attention sees and the window does not."""
        seen = numbers if self.family_window is None else numbers.clamp_max(self.family_window)
        return (seen - self.window - self.sinks).clamp_min(0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention within a call: w [B, T, H, D] and log Z [B, T, H] float32."""
        shape = q.shape
        if cu_seqlens is not None:
            q, k, v = (part.flatten(0, 1).unsqueeze(0) for part in (q, k, v))
        if self.cache_bits < 16:
            if cu_seqlens is not None:
                raise ValueError("cache bits: packed sequences are read in 16 bits; pad them instead")
            return quantised_attention(q, k, v, self.window, self.sinks, self.scale, self.cache_bits, self.softcap)
        near, lse = window_attention(q, k, v, self.window, self.sinks, self.scale, cu_seqlens, self.softcap)
        return near.view(shape), lse.view(shape[:3])

    def _attend_kept(
        self, q: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, seen: Tokens
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, for rows with padding or with tokens from the cache in front: keys, values [B, S + T, HK, D]."""
        if q.shape[1] <= few_queries(self.window, q):
            mask = tokens.sees(seen, self.window, self.sinks, None)
            return _masked(q, keys, values, mask, self.scale, self.softcap)
        near, lse = in_order(lambda q, k, v, _: self.attend(q, k, v, None), q, keys, values, seen)
        return near, lse


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of few queries: q [B, T, H, D], k, v [B, N, HK, D], mask [B, T, N] bool."""
    groups = q.shape[2] // k.shape[2]
    grouped = q.unflatten(2, (-1, groups)).float()
    scores = torch.einsum("bthgd,bnhd->bthgn", grouped, k.float()) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask[:, :, None, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    output = torch.einsum("bthgn,bnhd->bthgd", (scores - lse.unsqueeze(-1)).exp(), v.float())
    return output.flatten(2, 3).to(v.dtype), lse.flatten(2, 3)
