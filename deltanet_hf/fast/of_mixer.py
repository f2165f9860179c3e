"""Which form a mixer takes in calls without gradients."""

from __future__ import annotations

from typing import Any

from deltanet_hf.fast.delayed import FastDelayedRule
from deltanet_hf.fast.delta_rule import FastDeltaRule
from deltanet_hf.fast.mixer import FastMixer
from deltanet_hf.mixers.layer.delta_rule import DeltaRule


def fast_mixer(mixer: Any, may_move: bool) -> Any:
    """A mixer for calls without gradients; arguments as in `FastMixer.of`."""
    if FastDelayedRule.serves(mixer):
        return FastDelayedRule.of(mixer, may_move)
    return (FastDeltaRule if isinstance(mixer, DeltaRule) else FastMixer).of(mixer, may_move)
