"""The kinds of layers that can take the place of softmax attention: one row here; one file per mixer,
but for those of `quadratic/` and `inner_training/`.

How to add one: see docs/contributing.md. The tests run over every row of the table.
"""

from dataclasses import replace

from transformers import PreTrainedConfig

from deltanet_hf.errors import did_you_mean
from deltanet_hf.mixers.comba import Comba
from deltanet_hf.mixers.deltanet import DeltaNet
from deltanet_hf.mixers.deltaproduct import DeltaProduct
from deltanet_hf.mixers.efla import Efla
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.gated_linear import GatedLinear
from deltanet_hf.mixers.gdn2 import GatedDeltaNet2
from deltanet_hf.mixers.gla import GatedLinearAttention
from deltanet_hf.mixers.inner_training.mesa import Mesa
from deltanet_hf.mixers.inner_training.titans import Titans
from deltanet_hf.mixers.inner_training.ttt import TTT
from deltanet_hf.mixers.kda import KimiDeltaAttention
from deltanet_hf.mixers.layer.attention_shape import BESIDE_WINDOW, DELAYED
from deltanet_hf.mixers.layer.layer_kind import LayerKind
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.layer.settings import MixerSettings
from deltanet_hf.mixers.linear import Linear
from deltanet_hf.mixers.mixed_heads import MixedHeads, MixedHeadsSettings
from deltanet_hf.mixers.quadratic.decay_bias import ForgettingAttention, LinearBiasAttention
from deltanet_hf.mixers.quadratic.deltaformer import DeltaFormer
from deltanet_hf.mixers.quadratic.path import RelaxedPath
from deltanet_hf.mixers.retention import Retention
from deltanet_hf.mixers.window import WindowAttention

MIXERS: dict[str, type[LayerKind]] = {
    kind.name: kind
    for kind in (
        GatedDeltaNet,
        DeltaProduct,
        Linear,
        Retention,
        GatedLinear,
        GatedLinearAttention,
        DeltaNet,
        Efla,
        Comba,
        KimiDeltaAttention,
        GatedDeltaNet2,
        Mesa,
        TTT,
        Titans,
        WindowAttention,
        MixedHeads,
        ForgettingAttention,
        LinearBiasAttention,
        DeltaFormer,
        RelaxedPath,
    )
}

MixedHeadsSettings.mixers = MIXERS

WINDOW_SUFFIX = "+window"
MIXER_NAMES = (
    *(name for name in MIXERS if name != MixedHeads.name),
    *(f"{name}{WINDOW_SUFFIX}" for name, kind in MIXERS.items() if kind.has_state),
)
"""The names that `deltanet-hf convert --mixer` takes: those of `MIXERS`, and NAME+window for a window beside NAME.

Mixed heads are not among them: they come of a selection of key/value heads."""

FLOAT32_NAMES = tuple(sorted({name for kind in MIXERS.values() for name in kind.fp32}))
"""Last names of the parameters that are float32 whatever the model's dtype."""


def unknown_mixer(name: str) -> str:
    """The message about a mixer that does not exist."""
    names = [known for known in MIXER_NAMES if WINDOW_SUFFIX not in known]
    return (
        f"mixer: got {name!r}{did_you_mean(name, MIXER_NAMES)}; expected one of {', '.join(names)}, or "
        f"NAME{WINDOW_SUFFIX} for one that has a state"
    )


def recommended(
    name: str,
    profile: str = "faithful",
    training: bool = True,
    teacher: PreTrainedConfig | None = None,
    delayed: bool = True,
) -> tuple[type[LayerKind], MixerSettings]:
    """The mixer of a name in `MIXER_NAMES` or `MIXERS`, and its recommended settings.

    Args:
        profile, training: see `LayerKind.default_settings`.
        teacher: whose size decides about some settings; None for a small one.
        delayed: whether a state beside a window holds what has left it, where its rule may, instead of every token.

    Raises:
        ValueError: an unknown name or profile, or a window in a profile that has none.
    """
    if name not in MIXER_NAMES and name not in MIXERS:
        raise ValueError(unknown_mixer(name))
    kind = MIXERS[name.removesuffix(WINDOW_SUFFIX)]
    settings = kind.default_settings(profile, training)
    if teacher is not None and profile == "faithful":
        settings = settings.sized_for(teacher)
    if kind.name == name:
        return kind, settings
    if profile != "faithful":
        raise ValueError(f"profile: got {profile!r}, whose layer has no window; take the mixer {kind.name}")
    beside = BESIDE_WINDOW | (DELAYED if delayed and kind.may_delay else {})
    return kind, replace(settings, **beside)


__all__ = [
    "FLOAT32_NAMES",
    "MIXERS",
    "MIXER_NAMES",
    "WINDOW_SUFFIX",
    "LayerKind",
    "Mixer",
    "recommended",
    "unknown_mixer",
]
