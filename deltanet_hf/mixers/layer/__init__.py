"""The parts of a layer around its rule.

    layer_kind.py        the contract of every kind of layer, softmax kinds included
    layer_call.py        one call: what it is given, what its steps hand on, and calls that can be taken back
    mixer.py             a layer with a recurrent state: projections, norms, convolution, rotation, output
    delta_rule.py        base of the rules with a decay and a write strength
    channel_rule.py      base of those that decay per key channel
    settings.py          what config.json says of a layer, read and checked
    attention_shape.py   the attention that a mixer replaces, and the settings that all mixers share
    parts.py             modules with parameters of their own: short convolution, key offset, decay, output norm
    feature_maps.py      positive features of queries and keys
    delayed_state.py     a mixer whose state holds what has left its window: its call, and what a query reads
    delayed_window.py    the window beside it, and what leaves the window
    window_branch.py     softmax attention over a window, beside the state
    masks.py             padding and packed sequences, read off a call's arguments
    token_order.py       rows with padding, in the order that operators expect

Rules import from here.
"""

from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.layer.attention_shape import MixerProjections
from deltanet_hf.mixers.layer.channel_rule import ChannelRule
from deltanet_hf.mixers.layer.delta_rule import AdditiveSettings, DeltaRule, StepGates
from deltanet_hf.mixers.layer.layer_call import MixCall, Projected
from deltanet_hf.mixers.layer.layer_kind import LayerKind, PositionEmbeddings
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.layer.parts import Part
from deltanet_hf.mixers.layer.settings import MixerSettings

__all__ = [
    "AdditiveSettings",
    "ChannelRule",
    "DeltaRule",
    "LayerKind",
    "MixCall",
    "Mixer",
    "MixerProjections",
    "MixerSettings",
    "Part",
    "PositionEmbeddings",
    "Projected",
    "State",
    "StepGates",
    "TensorShape",
]
