"""The tensors of a packed cache: how many groups of tokens it keeps, their shapes, and how keys are packed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.state import TensorShape
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, token_blocks

PACKED_ROWS = "cache bits: packed sequences are read in 16 bits; call set_cache_bits(model, 16) first"
NAMES = ("key_codes", "key_scales", "value_codes", "value_scales", "keys", "values", "token_scales", "count")
PACKED = NAMES[:4]  # those with a dimension of groups, the third


@dataclass(frozen=True)
class PackedReach:
    """The part of a sequence that a cache keeps, and the part of that which a query sees.

    Attributes:
        bits: 8 or 4; others can be computed, but have no packed form.
        window: the most recent tokens that a query sees, itself included; None for all.
        sinks: the first tokens, at most 4, that it sees before the window too.
        family_window: the family's own window, outside of which sinks are not seen either.
        key_order: the key order of 4 bits (`PackedKeyValues`), or None.
    """

    bits: int
    window: int | None
    sinks: int = 0
    family_window: int | None = None
    key_order: Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, bits: int, window: int | None, sinks: int, family_window: int | None, key_order: Tensor | None = None
    ) -> PackedReach:
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
        return max(0, tokens - 1) // GROUP if self.window is None else -(-(self.window - 1) // GROUP)

    def shapes(self, heads: int, size: int, tokens: int) -> dict[str, TensorShape]:
        """The tensors of one sequence after `tokens` tokens."""
        groups, parts, blocks = self.groups(tokens), max(1, size // GROUP), token_blocks(size)
        own = TensorShape((heads, SINKS + GROUP, size), torch.uint8)
        return {
            "key_codes": TensorShape((heads, groups, GROUP, size * self.bits // 8), torch.uint8),
            "key_scales": TensorShape((heads, groups, size), torch.int16),
            "value_codes": TensorShape((heads, groups, size, GROUP * self.bits // 8), torch.uint8),
            "value_scales": TensorShape((heads, groups, parts, GROUP), torch.int16),
            "keys": own,
            "values": own,
            "token_scales": TensorShape((heads, SINKS + GROUP, 4 * blocks), torch.uint8),
            "count": TensorShape((), torch.int32),
        }
