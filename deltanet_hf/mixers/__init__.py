"""The kinds of layers that can take the place of softmax attention: one file per mixer, one row here.

How to add one: see docs/contributing.md. The tests run over every row of the table.
"""

from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.deltaproduct import DeltaProduct
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer_kind import LayerKind
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.window import WindowAttention

MIXERS: dict[str, type[LayerKind]] = {
    kind.name: kind
    for kind in (
        GatedDeltaNet,
        DeltaProduct,
        WindowAttention,
        MixedHeads,
    )
}

FLOAT32_NAMES = tuple(sorted({name for kind in MIXERS.values() for name in kind.fp32}))
"""Last names of the parameters that are float32 whatever the model's dtype."""

__all__ = ["FLOAT32_NAMES", "MIXERS", "LayerKind", "Mixer"]
