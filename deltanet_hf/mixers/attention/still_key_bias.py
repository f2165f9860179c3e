"""Leaves out what a key's bias adds in channels that the rotation hardly turns.

There it adds nearly the same to the scores of all keys, which softmax does not see. Keys of few bits do: the steps of
a packed group reach no further from zero than 63 halves of one, and Qwen2.5-1.5B has biases of 456 in its first layer,
beside keys that differ by a few units (docs/research/conversion.md).
"""

from __future__ import annotations

from typing import Any

import torch

MOST_TURN = 0.1  # radian


@torch.no_grad()
def drop_still_key_bias(attention: Any, rotary: Any, positions: int) -> None:
    """Set the bias to zero in channels that turn by less than `MOST_TURN` over all positions.

    Nothing changes where keys are normed after the bias is added, or scores stand beside learned sinks.

    Args:
        attention: of a family; changed in place.
        rotary: the family's rotary embedding. Of its `inv_freq` [R / 2], number i is the radian per position of the
            channels i and R / 2 + i of a head; those from R on do not turn.
        positions: that the model reads.
    """
    bias = getattr(getattr(attention, "k_proj", None), "bias", None)
    if bias is None or any(getattr(attention, name, None) is not None for name in ("k_norm", "sinks")):
        return
    still = torch.ones(attention.head_dim, dtype=torch.bool, device=bias.device)
    still[: 2 * len(rotary.inv_freq)] = (rotary.inv_freq * positions < MOST_TURN).to(bias.device).repeat(2)
    bias.unflatten(0, (-1, attention.head_dim)).masked_fill_(still, 0.0)
