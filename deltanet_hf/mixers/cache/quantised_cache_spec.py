"""The tensors of a packed cache: how many groups of tokens it keeps, their shapes, and how keys are packed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.state import TensorShape
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, is_packable, token_blocks

PACKED_ROWS = "cache bits: packed sequences are read in 16 bits; call set_cache_bits(model, 16) first"
NAMES = ("key_codes", "key_scales", "value_codes", "value_scales", "keys", "values", "token_scales", "count")
PACKED = NAMES[:4]  # those with a dimension of groups, the third


def check_packable(head_dim: int, bits: int) -> None:
    """Raise UserError for heads that have no packed form."""
    if not is_packable(head_dim):
        raise UserError(
            f"cache bits: got heads of {head_dim} channels, of which {bits} bits need a multiple of {GROUP} or an even "
            "number below; use 16"
        )


def groups_before(tokens: int) -> int:
    """The groups that are complete before the last of `tokens` tokens: packed, where all are kept."""
    return max(0, tokens - 1) // GROUP


def tokens_before(tokens: int) -> int:
    """The tokens of these groups."""
    return groups_before(tokens) * GROUP


def whole_window(tokens: float) -> int:
    """The shortest window of at least `tokens` tokens before which whole groups are kept, and at least one."""
    return max(1, math.ceil((tokens - 1) / GROUP)) * GROUP + 1


def key_ranges(k: Tensor) -> Tensor:
    """How far the keys k [HK, T, D] reach in each group: [N, HK, D], without the first group if there are others.

    The first tokens, which are not packed, are unlike the others.
    """
    groups = [group for group in k.split(GROUP, dim=1) if group.shape[1] == GROUP] or [k]
    return torch.stack([group.amax(1) - group.amin(1) for group in groups[1:] or groups])


@dataclass(frozen=True)
class QuantisedCacheSpec:
    """The part of a sequence that a cache keeps, and the part of that which a query sees.

    Attributes:
        bits: 8 or 4; others can be computed, but have no packed form.
        window: the most recent tokens that a query sees, itself included; None for all.
        sinks: the first tokens, at most 4, that it sees before the window too.
        family_window: the family's own window, outside of which sinks are not seen either.
        key_order: the key order of 4 bits (`PackedKeyValues`), or None.
        edge: as for `window_attention`.
    """

    group_size: ClassVar[int] = GROUP  # tokens

    bits: int
    window: int | None
    sinks: int = 0
    family_window: int | None = None
    key_order: Tensor | None = field(default=None, compare=False)
    edge: int = 1

    @classmethod
    def of(
        cls, bits: int, window: int | None, sinks: int, family_window: int | None, key_order: Tensor | None = None
    ) -> QuantisedCacheSpec:
        """A window within the family's own; other bits than 4 have no key order.

        Raises:
            UserError: more sinks than stay in 8 bits.
        """
        key_order = key_order if bits == 4 else None
        if family_window is not None and (window is None or family_window <= window):
            return cls(bits, family_window, key_order=key_order)
        if sinks > SINKS:
            raise UserError(
                f"cache bits: got {sinks} sinks, of which a cache of {bits} bits keeps {SINKS}; use 16 bits"
            )
        return cls(bits, window, sinks, family_window, key_order)

    def groups(self, tokens: int) -> int:
        """N: the packed groups after `tokens` tokens."""
        return groups_before(tokens) if self.window is None else -(-(self.window - 1) // GROUP)

    def shapes(self, heads: int, size: int, tokens: int) -> dict[str, TensorShape]:
        """The tensors of one sequence after `tokens` tokens."""
        before, group = (heads, self.groups(tokens)), self.group_shapes(size).items()
        own = TensorShape((heads, SINKS + GROUP, size), torch.uint8)
        return {
            **{name: TensorShape((*before, *one.shape), one.dtype) for name, one in group},
            "keys": own,
            "values": own,
            "token_scales": TensorShape((heads, SINKS + GROUP, 4 * token_blocks(size)), torch.uint8),
            "count": TensorShape((), torch.int32),
        }

    def group_shapes(self, size: int) -> dict[str, TensorShape]:
        """The tensors of one packed group of one head."""
        return {
            "key_codes": TensorShape((GROUP, size * self.bits // 8), torch.uint8),
            "key_scales": TensorShape((size,), torch.int16),
            "value_codes": TensorShape((size, GROUP * self.bits // 8), torch.uint8),
            "value_scales": TensorShape((max(1, size // GROUP), GROUP), torch.int16),
        }


def held_bytes(
    heads: int,
    size: int,
    tokens: int,
    bits: int,
    dtype: torch.dtype,
    window: int | None,
    sinks: int,
    family_window: int | None = None,
) -> int:
    """Bytes of the keys and values of `heads` heads of `size` channels; for the others see `QuantisedCacheSpec`.

    Tensors of 16 bits are counted without the numbers of their tokens.
    """
    if bits < 16:
        shapes = QuantisedCacheSpec.of(bits, window, sinks, family_window).shapes(heads, size, tokens)
        return sum(shape.nbytes for shape in shapes.values())
    seen = tokens if window is None else min(tokens, window + sinks)
    return 2 * heads * size * dtype.itemsize * (seen if family_window is None else min(seen, family_window))
