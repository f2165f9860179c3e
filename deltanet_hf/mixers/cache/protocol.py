"""The protocol of cache layers, by which sessions, snapshots, graphs and sums of bytes know no kinds.

A new kind of cache is a class and a row. The class derives from `MixerCacheLayer` (state.py) and says in `shapes` which
of its tensors grow; where none does, `MixerCacheLayer` is the class. The row is `cache_class` of the layer that keeps
it. Layers of transformers are wrapped (`key_values.py`).

Shapes: B batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
"""The tensors that a layer keeps between calls, by the names of its `state_shapes`; each begins with the batch."""


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of one tensor of a state, for one sequence (without the batch)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class CacheLayer:
    """The contract of a layer of a cache, and of a part of a layer with mixed heads."""

    written: Tensor | None = None
    """Ids [B, T] of the first tokens, where `generate` knows them and the layer can say later that they differ."""
    grows: bool = False
    """Whether some of its tensors become larger with the tokens, without end."""
    in_order: bool = True
    """Whether its last token stands last."""
    unmovable: str | None = None
    """The name of its class, if its tensors can neither be written to a file nor take other addresses."""

    @property
    def batch_size(self) -> int:
        """B; -1 before the first token."""
        raise NotImplementedError

    @property
    def tokens(self) -> int | Tensor | None:
        """Number of tokens that it has seen, on the device in static caches; None if the layer does not count them."""
        return self.get_seq_length()  # type: ignore[attr-defined, no-any-return]

    def tensors(self, window: int | None = None) -> State:
        """All that it holds, not copied; empty before the first token.

        Args:
            window: the model's sliding window there, of which a cache that was made without its config knows nothing.
        """
        raise NotImplementedError

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        """The tensors of one sequence after `tokens` tokens, of a layer that holds some."""
        raise NotImplementedError

    def put(self, tensors: State, tokens: int) -> None:
        """Go on from what another such layer held after `tokens` tokens; no tensors are those before the first one."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def fits_window(self, window: int | None) -> bool:
        """Whether keys and values of transformers, if it has any, are those of this sliding window (None: of all)."""
        return True

    def takes_prompt(self, tokens: int) -> bool:
        """Whether it is as transformers made it, and may be replaced by what a captured prompt of `tokens` leaves."""
        return False

    # Snapshots.

    def snapshot(self) -> Any:
        """All that it holds, for `rewind`; calls do not change it."""
        raise NotImplementedError

    def rewind(self, contents: Any) -> None:
        """Bring back what `snapshot` has returned."""
        raise NotImplementedError

    def after(self, tokens: int, copied: Callable[[Tensor], Tensor]) -> Any:
        """A layer that has read the first `tokens` tokens, with tensors that `copied` returns.

        Of tensors that do not grow, this one holds what they are after these tokens.
        """
        raise NotImplementedError

    # Fixed addresses, as a captured step needs them.

    def room(self, tokens: int, places: Callable[[int | None, Tensor], Any]) -> Any:
        """Memory for the tensors of layers like this one, with places for `tokens` tokens.

        Args:
            places: gives the `Places` of keys and values [B, H, S, D] with a sliding window.
        """
        raise NotImplementedError

    def fix(self, room: Any, tokens: int, longest: int | None) -> Any:
        """Bring its contents, after `tokens` tokens, into the `room`; returns the layer that stands in the cache then.

        A step changes the room in place, and does not count its token. There will be `longest` tokens at most, if that
        is known.
        """
        raise NotImplementedError

    def release(self, tokens: int, copied: bool) -> Any:
        """The way back from `fix`, after `tokens` tokens; returns the layer that stood in the cache before.

        Its tensors are copied, or those of the room where they can be.
        """
        raise NotImplementedError

    def changed(self, number: int) -> Iterable[Tensor]:
        """Between `fix` and `release`: the tensors that the step of token `number`, from 0, changes."""
        raise NotImplementedError


def leading(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first entries of x [B, ...] in each dimension but the batch, as many as `shape` has: x itself, or a view."""
    places = (slice(None), *map(slice, shape))
    return x if x.shape[1:] == torch.Size(shape) else x[places]
