"""The calls of the operators on a packed cache: the arguments of each, documented, as one typed object."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from deltanet_kernels.common.rotation import turned
from deltanet_kernels.packed_cache.layout import PackedKeyValues

EVERYTHING = 2**30  # as a window: more tokens than there are


def reach_of(window: int | None, sinks: int, limit: int | None) -> tuple[int, int, int]:
    """`window`, `sinks` and `limit` of the tokens that are seen, as numbers."""
    limit = EVERYTHING if limit is None else limit
    return min(EVERYTHING if window is None else window, limit), sinks, limit


class PackedAttentionCall(NamedTuple):
    """Softmax attention of the last token of each sequence to a packed cache that holds it. No gradients.

    HK divides HQ, and query head j reads key head j // (HQ/HK). On CUDA packed numbers are restored in registers, and
    programs share the groups of a sequence.

    Args:
        q: queries [B, HQ, 1, D].
        cache: of sequences of at least one token, its tensors contiguous.
        window: the most recent tokens that are seen, the last itself included; None for all.
        sinks: the first tokens, at most 4, that are seen before the window too.
        limit: the most recent tokens outside of which sinks are not seen either; None for all.
        scale: factor of the scores, D**-0.5 by default.
        softcap: the scores s become softcap * tanh(s / softcap).
        edge: as for `window_attention`.
        first_q: the queries that the first four tokens meet, once they are not of the last token's group of 32; q by
            default.

    Returns:
        o [B, HQ, 1, D] in the dtype of q, and the log-sum-exp of the scores [B, HQ], float32 at least.

    Raises:
        ValueError: shapes, a window or sinks that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    cache: PackedKeyValues
    window: int | None = None
    sinks: int = 0
    limit: int | None = None
    scale: float | None = None
    softcap: float | None = None
    edge: int = 1
    first_q: Tensor | None = None

    @property
    def reach(self) -> tuple[int, int, int]:
        """The tokens that are seen: `window`, `sinks` and `limit` as numbers."""
        return reach_of(self.window, self.sinks, self.limit)

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


class PackedStepCall(NamedTuple):
    """Puts the next token of each sequence into a packed cache, in place, and attends from it. No gradients.

    On CUDA these are three kernels: one rotates, packs a group that is complete and puts the token, two attend.

    Args:
        q: the token's queries [B, 1, HQ, D].
        k, v: its key and value [B, 1, HK, D], not rounded.
        cache: its tensors contiguous; N > 0 if any sequence goes beyond 32 tokens, and as many as are to be seen.
            Sequences have fewer than 2**23 tokens.
        window, sinks, limit, scale, softcap, edge: as for `packed_attention`.
        cos, sin: of a rotary embedding, [B, 1, R] or [1, 1, R] with an even R <= D, as for `window_step_`. Keys are
            kept rotated.
        state_indices: [B] int32, the row of the cache's tensors that holds each sequence; otherwise as for
            `gated_delta_step_`.
        pages: [B, M] int32, only with indices: the rows of the packed tensors (the first four) that hold each sequence,
            N groups a row. Group g is in the place g % (M N) of them, counted through the M rows. By default M = 1 and
            the row is the index.
        turn_cos, turn_sin: [B, 1, R] or [1, 1, R], by which rotated queries turn on before they meet the first four
            tokens (`first_q` of `packed_attention`).

    Returns:
        o [B, 1, HQ, D] in the dtype of q, and the log-sum-exp of the scores [B, 1, HQ], float32 at least.

    Raises:
        ValueError: shapes, a window or sinks that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cache: PackedKeyValues
    window: int | None = None
    sinks: int = 0
    limit: int | None = None
    scale: float | None = None
    softcap: float | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    state_indices: Tensor | None = None
    pages: Tensor | None = None
    edge: int = 1
    turn_cos: Tensor | None = None
    turn_sin: Tensor | None = None

    @property
    def packed_rows(self) -> Tensor | None:
        """`pages`, or what they are by default [B, 1]; None without indices."""
        return self.state_indices.unsqueeze(1) if self.pages is None and self.state_indices is not None else self.pages

    @property
    def attention(self) -> PackedAttentionCall:
        """The attention to a cache that holds the token, of queries [B, HQ, 1, D] that are rotated already."""
        first_q = None
        if self.turn_cos is not None and self.turn_sin is not None:
            first_q = turned(self.q, (self.turn_cos, self.turn_sin)).transpose(1, 2)
        return PackedAttentionCall(self.q.transpose(1, 2), *self[3:9], self.edge, first_q)


class RoundTokensCall(NamedTuple):
    """Keys and values as a packed cache takes them in: in 8 bits (`PackedKeyValues`). Gradients pass it unchanged.

    Args:
        k, v: [B, T, HK, D]; D a multiple of 32, or less than 32 and even.

    Returns:
        k and v in their dtype, which has the rounded numbers exactly.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that do not fit.
    """

    k: Tensor
    v: Tensor


class PackGroupsCall(NamedTuple):
    """Quantises complete groups of 32 tokens, in one pass.

    Args:
        k, v: [B, HK, N * 32, D]; D a multiple of 32, or less than 32 and even.
        bits: 8 or 4.
        key_order: as in `PackedKeyValues`, for 4 bits and D a multiple of 8.

    Returns:
        The first four tensors of `PackedKeyValues`.

    Raises:
        ValueError: shapes or bits that do not fit.
        TypeError: dtypes that do not fit.
    """

    k: Tensor
    v: Tensor
    bits: int
    key_order: Tensor | None = None


class PackPromptCall(NamedTuple):
    """Makes the cache of sequences of T tokens, and what their queries see of it.

    Args:
        k, v: [B, T, HK, D] as `round_tokens` gives them; T >= 1; D a multiple of 32, or less than 32 and even.
        bits: 8 or 4.
        groups: the most recent groups that the cache holds; None for all N = (T - 1) // 32 that are complete and
            before the last token.
        length: [1] int64: as if the first `length` tokens, at least 1, were all; what follows them is padding. It is
            read on the device. All T by default.
        key_order: as in `PackedKeyValues`, for 4 bits and D a multiple of 8.
        cu_seqlens: offsets of sequences packed into one row, each of which gets a row of the cache; without `length`.
        longest: the most tokens of such a sequence, which T stands for in N.

    Returns:
        The tensors of `PackedKeyValues`, and keys and values [B, N * 32, HK, D] as queries of later groups see them:
        restored from the codes, the first four tokens as in k and v. The latter are those of all T tokens. With
        `cu_seqlens` they are [1, T, HK, D], any finite numbers behind the complete groups of each sequence.

    Raises:
        ValueError: shapes or bits that do not fit.
        TypeError: dtypes that do not fit.
    """

    k: Tensor
    v: Tensor
    bits: int
    groups: int | None = None
    length: Tensor | None = None
    key_order: Tensor | None = None
    cu_seqlens: Tensor | None = None
    longest: int = 0


class PackedPartCall(NamedTuple):
    """Several tokens after those of a packed cache: their attention, and the cache after them. No gradients.

    It is as if the tokens had come one by one, or all at once: a query sees its own group of 32 tokens and the first
    four tokens in 8 bits, and earlier groups as they are restored. On CUDA these are two kernels, those of a prompt.

    Args:
        q: queries [B, T, HQ, D]; T >= 1.
        k, v: keys and values [B, T, HK, D] as `round_tokens` gives them.
        cache: before the tokens, with as many groups as the first query sees; it stays as it is. Sequences may have no
            tokens yet, and different numbers of them. Numbers of tokens are read on the device.
        groups: N of the cache after the tokens.
        window, sinks, limit, scale, softcap, edge: as for `packed_attention`.
        cu_seqlens: boundaries [B + 1] of the tokens of B sequences in q, k and v, which then have one row.
        longest: the most tokens of such a sequence.

    Returns:
        o [B, T, HQ, D] in the dtype of q, the log-sum-exp of the scores [B, T, HQ], float32 at least, the cache after
        the tokens, and keys and values [B, L, HK, D] as queries of later groups see them: those of the groups before
        the last token, from the first that the old cache may hold, max(0, (n - 1) // 32 - N) after n tokens. Behind
        these, for the first four tokens, and with `cu_seqlens` they are any finite numbers. What places of the new
        cache without a token hold is 0.

    Raises:
        ValueError: shapes, a window or sinks that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cache: PackedKeyValues
    groups: int
    window: int | None = None
    sinks: int = 0
    limit: int | None = None
    scale: float | None = None
    softcap: float | None = None
    cu_seqlens: Tensor | None = None
    longest: int = 0
    edge: int = 1

    @property
    def reach(self) -> tuple[int, int, int]:
        """As in `PackedAttentionCall`."""
        return reach_of(self.window, self.sinks, self.limit)

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


class PromptAttentionCall(NamedTuple):
    """`window_attention` in which queries see tokens before their own group of 32 in another form.

    Tokens of a query's own group, and sinks, are those of k and v. The other form is k and v rounded: its gradients are
    added to those of k and v (straight-through), and it gets none itself.

    Args:
        q: queries [B, T, HQ, D]; T >= 1.
        k, v: keys and values [B, T, HK, D], dtype of q.
        keys, values: the other form of the N = (T - 1) // 32 groups before the last token, [B, N * 32, HK, D], dtype
            of q; the first four tokens as in k and v.
        window, scale, softcap, edge: as for `window_attention`.
        sinks: as for `window_attention`, at most 4.
        cu_seqlens, longest: as for `pack_prompt`, which makes keys and values [1, T, HK, D] then; without gradients.

    Returns:
        o [B, T, HQ, D] in the dtype of q, and the log-sum-exp of the scores [B, T, HQ], float32 at least.

    Raises:
        ValueError: shapes, a window or sinks that do not fit, or keys or values that require gradients.
        TypeError: dtypes that do not fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    window: int
    sinks: int
    scale: float
    softcap: float | None = None
    edge: int = 1
    cu_seqlens: Tensor | None = None
    longest: int = 0
