"""Softmax attention over a sliding window and attention sinks, mixed with the recurrent state of the same layer.

For token t and head h, with w_t the softmax attention to the last `window` and the first `sinks` tokens of the sequence
and o_t the state's output after its norm and gate,

    y_t = (1 - s_t) w_t + s_t o_t        s_t = sigmoid(share_proj(x_t) + far_slope log f_t - near_slope log Z_t)

where Z_t is the sum of exponentials that normalises w_t and f_t the number of earlier tokens that the window does not
see; s_t = 0 while f_t = 0. If o_t were the softmax attention to those f_t tokens, with the sum of exponentials F_t,
then y_t would be the complete softmax attention for s_t = F_t / (F_t + Z_t), whose logit is
log(F_t / f_t) + log f_t - log Z_t. So both slopes begin at 1, and `share_proj` predicts the logarithm of the mean
exponential of what the window misses.
As long as a sequence fits into window and sinks, the layer is the teacher's attention. Scores are capped where the
teacher's are (Gemma 2), and Z_t has its learned sinks in it, if there are any (gpt-oss).

Shapes: B batch, T tokens of a call, HQ query heads, HK key/value heads, D head size, S = sinks + window places.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.quantised_cache_spec import NAMES, PACKED_ROWS, QuantisedCacheSpec
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache
from deltanet_hf.mixers.cache.sinks_apart import Scores, leaves_out, with_learned_sinks, with_sinks
from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.cache.window_cache import SinkCache, Tokens, window_shapes
from deltanet_hf.mixers.layer.attention_shape import AttentionShape, MixerProjections
from deltanet_hf.mixers.layer.layer_call import LayerCall
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.parts import Part
from deltanet_hf.mixers.layer.token_order import few_queries, in_order
from deltanet_kernels import prompt_attention, window_attention
from deltanet_kernels.common.rotation import turned
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.packed_cache.calls import PromptAttentionCall
from deltanet_kernels.packed_cache.layout import SINKS
from deltanet_kernels.window.masked import attention


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
        """unseen [B, T] (at least 1), lse [B, T, HQ] float32 -> [B, T, HQ] float32."""
        return self.far_slope.float() * unseen.float().log().unsqueeze(-1) - self.near_slope.float() * lse


class WindowBranch(Part):
    """See the module's docstring.

    Args:
        shape: the attention that the layer replaces.
        settings: the mixer's settings, with `window` >= 1.
    """

    FP32 = ("far_slope", "near_slope")
    STATE = ("keys", "values", "numbers", "count")  # in 16 bits
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
        self.delayed, self.edge = settings.delayed, 1
        if self.delayed:  # whole groups before a query's own
            self.edge = QuantisedCacheSpec.group_size
            self.window = cdiv(self.window - 1, self.edge) * self.edge + 1
        self.learned_sinks = nn.Parameter(torch.empty(self.heads)) if shape.learned_sinks else None
        self.share_proj = nn.Linear(shape.hidden_size, self.heads)
        self.slopes = ShareSlopes(self.heads)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.learned_sinks is not None:
            self.learned_sinks.zero_()

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the window's part of the layer's state."""
        return self.STATE if self.cache_bits == 16 else NAMES

    @property
    def cache_spec(self) -> QuantisedCacheSpec:
        """The contents of a cache in less than 16 bits.

        Raises:
            UserError: more sinks than the packed form has, or fewer beside a state of what has left the window: the
                first tokens are not packed, and such a state is written from packed tokens.
        """
        order = getattr(self, "key_order", None)
        if self.delayed and self.sinks < SINKS:
            raise UserError(
                f"cache bits: got {self.sinks} sinks beside a state of what has left the window, which needs {SINKS} "
                f"in {self.cache_bits} bits; set them so, or use 16 bits"
            )
        return replace(QuantisedCacheSpec.of(self.cache_bits, self.window, self.sinks, None, order), edge=self.edge)

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        """The window's part of the layer's state."""
        if self.cache_bits < 16:
            return self.cache_spec.shapes(self.kv_heads, self.head_dim, 0)
        return window_shapes(self.kv_heads, self.head_dim, self.places + self.sinks, dtype)

    def forward(
        self,
        logits: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state_output: Tensor,
        call: LayerCall,
    ) -> tuple[Tensor, State]:
        """The layer's output before `o_proj`, and the window's part of the new state (empty unless it is kept).

        Args:
            logits: of the state's share, as `share_proj` gives them [B, T, HQ].
            q, k, v: [B, T, HQ, D], [B, T, HK, D], [B, T, HK, D] as softmax attention sees them.
            state_output: [B, T, HQ, D], the state's output after its norm and gate.
            call: the layer's call.
        """
        tokens = self.tokens(q, call)
        window_output, lse, new_state = self.window_output(q, k, v, call, tokens)
        return self.mixture(logits, window_output, lse, state_output, tokens.numbers), new_state

    def mixture(
        self, logits: Tensor, window_output: Tensor, lse: Tensor, state_output: Tensor, numbers: Tensor
    ) -> Tensor:
        """y [B, T, HQ, D] from w, log Z and the state's output; arguments as in `forward` and `mixing_gate`."""
        mixing_gate = self.mixing_gate(logits, lse, numbers).unsqueeze(-1)
        return window_output + mixing_gate.to(window_output.dtype) * (
            state_output.to(window_output.dtype) - window_output
        )

    def tokens(self, x: Tensor, call: LayerCall) -> Tokens:
        """The tokens x [B, T, ...] of a call, by their numbers in their sequences."""
        batch, length = x.shape[:2]
        before = None if call.state is None else call.state["count"]
        return Tokens.of(batch, length, call.padding, call.cu_seqlens, before, x.device)

    def window_output(
        self, q: Tensor, k: Tensor, v: Tensor, call: LayerCall, tokens: Tokens
    ) -> tuple[Tensor, Tensor, State]:
        """The attention, w [B, T, HQ, D] and log Z [B, T, HQ] float32, and the window's part of the new state."""
        padding, state = call.padding, call.state
        own = {} if state is None else {name: state[name] for name in self.state_names}
        if self.cache_bits < 16:
            if call.cu_seqlens is not None and call.lengths is None:
                raise ValueError(PACKED_ROWS)
            packed = QuantisedKVCache(
                self.cache_spec,
                own,
                padding,
                keep_state=call.keep_state,
                lengths=call.lengths,
                cu_seqlens=call.cu_seqlens,
            )
            window_output, lse = with_learned_sinks(
                *packed.attend(q, k, v, self.scale, self.softcap), self.learned_sinks
            )
            return window_output, lse, packed.state
        if not call.keep_state and (call.cu_seqlens is not None or padding is None):
            return *self.attend(q, k, v, call.cu_seqlens), {}
        sink_cache = SinkCache(self.window, self.sinks, own, tokens, cu_seqlens=call.cu_seqlens)
        keys, values = sink_cache.update(k.transpose(1, 2), v.transpose(1, 2), 0)
        if state is None and padding is None:
            window_output, lse = self.attend(q, k, v, call.cu_seqlens)
        else:
            window_output, lse = self._attend_kept(
                q, keys.transpose(1, 2), values.transpose(1, 2), tokens, sink_cache.seen
            )
        return window_output, lse, sink_cache.state

    def mixing_gate(self, logits: Tensor, lse: Tensor, numbers: Tensor) -> Tensor:
        """The state's share [B, T, HQ] float32 of the output.

        Args:
            logits: of `share_proj` [B, T, HQ]; lse: log Z [B, T, HQ] float32.
            numbers: of the tokens, [B, T] or [1, T], from 1.
        """
        unseen = self.unseen(numbers)
        logit = logits.float() + self.slopes(unseen.clamp_min(1), lse)
        return logit.sigmoid() * (unseen > 0).unsqueeze(-1)

    @property
    def places(self) -> int:
        """Tokens that the window keeps, besides the sinks."""
        return self.window + self.edge - 1

    @property
    def groups(self) -> int:
        """N: whole groups before a query's own that it sees, with a state of what has left the window."""
        return (self.window - 1) // self.edge

    def unseen(self, numbers: Tensor) -> Tensor:
        """Number of earlier tokens that the teacher's attention sees and the window does not; `numbers` from 1."""
        seen = numbers if self.family_window is None else numbers.clamp_max(self.family_window)
        begin = (numbers - 1) // self.edge * self.edge + 1 - self.window
        return (seen - numbers + begin - self.sinks).clamp_min(0)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, turn: PositionEmbeddings | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention within a call in 16 bits: w [B, T, HQ, D] and log Z [B, T, HQ] float32; `turn` as in
        `with_sinks`."""
        shape, rows = q.shape, (q, k, v)
        if cu_seqlens is not None:
            q, k, v = (part.flatten(0, 1).unsqueeze(0) for part in rows)
        reach = self.window, self.sinks if turn is None else 0
        window_output, lse = window_attention(q, k, v, *reach, self.scale, cu_seqlens, self.softcap, edge=self.edge)
        window_output, lse = window_output.view(shape), lse.view(shape[:3])
        if turn is not None:
            numbers = Tokens.of(shape[0], shape[1], None, cu_seqlens, None, q.device).numbers
            window_output, lse = self.with_sinks(window_output, lse, *rows, numbers, turn, cu_seqlens is not None)
        return with_learned_sinks(window_output, lse, self.learned_sinks)

    def attend_rounded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: tuple[Tensor, Tensor],
        turn: PositionEmbeddings | None,
        cu_seqlens: Tensor | None,
        longest: int,
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, of whole sequences whose k, v and `seen` are those of `quantised_prompt`."""
        sinks = self.sinks if turn is None else 0
        reach, row = (self.window, sinks), (cu_seqlens, longest)
        call = PromptAttentionCall(q, k, v, *seen, *reach, self.scale, self.softcap, self.edge, *row)
        window_output, lse = prompt_attention.unchecked(call)
        if turn is not None:
            numbers = Tokens.of(len(q), q.shape[1], None, cu_seqlens, None, q.device).numbers
            window_output, lse = self.with_sinks(window_output, lse, q, k, v, numbers, turn, cu_seqlens is not None)
        return with_learned_sinks(window_output, lse, self.learned_sinks)

    def with_sinks(
        self,
        near: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        numbers: Tensor,
        turn: PositionEmbeddings,
        packed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Adds the sinks outside of the window to the attention of the window alone (`cache/sinks_apart.py`).

        Args:
            near, lse: that attention [B, T, HQ, D] and its log-sum-exp [B, T, HQ].
            q: [B, T, HQ, D].
            k, v: [B, N, HK, D], the sinks of a row first; or of all tokens of sequences that are packed.
            numbers: of the queries in their sequences, [B, T] or [1, T], from 1.
            turn: cos and sin [B or 1, T, R] by which queries turn before they meet sinks.
            packed: whether rows hold several sequences.
        """
        if packed:
            place = torch.arange(numbers.numel(), device=q.device).view_as(numbers) - numbers + 1
            place = place.unsqueeze(-1) + torch.arange(self.sinks, device=q.device)
            k, v = (x.flatten(0, 1)[place.clamp(max=numbers.numel() - 1)] for x in (k, v))
        else:
            k, v = k[:, : self.sinks], v[:, : self.sinks]
        seen = leaves_out(numbers, k.shape[-3], self.window, self.edge)
        return with_sinks(near, lse, turned(q, turn), k, v, seen, Scores(self.scale, self.softcap))

    def _attend_kept(
        self, q: Tensor, keys: Tensor, values: Tensor, tokens: Tokens, seen: Tokens
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, for rows with padding or with tokens from the cache in front: keys, values [B, S + T, HK, D]."""
        if q.shape[1] <= few_queries(self.window, q):
            mask = tokens.sees(seen, self.window, self.sinks, None).unsqueeze(1)
            k, v = (x.transpose(1, 2).float() for x in (keys, values))
            window_output, lse = attention(q.float(), k, v, mask, self.scale, self.softcap)
            return with_learned_sinks(window_output.to(values.dtype), lse, self.learned_sinks)
        window_output, lse = in_order(lambda q, k, v, _: self.attend(q, k, v, None), q, keys, values, seen)
        return window_output, lse
