"""The layer table: which kind of layer stands where. It is the `deltanet` entry of config.json.

    {"kinds": {"linear": {"mixer": "gated_deltanet", ...}, "local": {"mixer": "window", "window": 64, "sinks": 4}},
     "layers": ["linear", "softmax", "local", ...], "cache_bits": 4, "key_order": true}

`layers` names a kind for every decoder layer; "softmax" is the teacher's own attention. Nothing else in the project
computes which layers are converted. `cache_bits` is how many bits keys and values have in the model's cache
(`cache_bits.py`); without it they have 16. With `key_order` the model has tensors that say which channels of its keys
have 5 and 3 of the 4 bits (`cache_bits.add_key_order`). `positions` are those of a model that reads
further than its teacher (`far_positions.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from deltanet_hf.mixers import MIXERS, LayerKind, recommended
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.layer.layer_kind import kinds_among
from deltanet_hf.mixers.layer.settings import MixerSettings
from deltanet_hf.mixers.mixed_heads import MixedHeads, MixedHeadsSettings
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.models.cache_bits import BITS
from deltanet_hf.models.far_positions import FarPositions
from deltanet_hf.models.unwrapped import decoder_layers

SOFTMAX = "softmax"
INSERTED_QK_NORMS = "inserted_qk_norms"  # key of config.json: softmax layers whose q/k norms are not the teacher's


@dataclass(frozen=True)
class Kind:
    """A kind of layer: a mixer and its settings."""

    mixer: type[LayerKind]
    settings: Any

    @property
    def recurrent(self) -> Any:
        """The settings of its mixer with a recurrent state, which mixed heads may hold; None without one."""
        return self.mixer.recurrent_settings(self.settings)

    @property
    def rule(self) -> type[LayerKind]:
        """The mixer; where heads are mixed, that of the linear ones."""
        return MIXERS[getattr(self.settings, "linear_mixer", self.mixer.name)]

    @property
    def has_new_weights(self) -> bool:
        """Whether it has weights that the teacher does not have; windows, alone or beside softmax heads, have none."""
        return self.recurrent is not None or self.mixer.keeps_all_tokens

    @property
    def takes_plan(self) -> bool:
        """Whether a budget in bytes plans its windows: alone, or beside a state of what has left them."""
        return self.mixer is WindowAttention or bool(getattr(self.settings, "delayed", False))

    def with_window(self, window: int) -> Kind:
        """The same with a window of so many tokens."""
        return Kind(self.mixer, self.settings.with_window(window))

    def with_softmax_heads(self, num_heads: int, softmax: Collection[int]) -> Kind:
        """Mixed heads: softmax for the key/value heads in `softmax`, this kind for the others of `num_heads`."""
        others = "window" if self.mixer is WindowAttention else "linear"
        heads: Any = tuple(SOFTMAX if head in softmax else others for head in range(num_heads))
        if self.mixer is WindowAttention:
            return Kind(MixedHeads, MixedHeadsSettings(heads, self.settings.window, self.settings.sinks))
        return Kind(MixedHeads, MixedHeadsSettings(heads, linear_mixer=self.mixer.name, linear=self.settings))

    def to_dict(self) -> dict[str, Any]:
        return {"mixer": self.mixer.name, **self.settings.to_dict()}


@dataclass(frozen=True)
class LayerTable:
    """The kind of every decoder layer.

    Args:
        kinds: kinds by the names that `layers` uses.
        layers: a name of `kinds`, or "softmax", per decoder layer.
        cache_bits: bits of keys and values in the cache.
        key_order: whether the model has a key order.
        positions: those of a model that reads further than its teacher; None for the teacher's.
    """

    kinds: Mapping[str, Kind]
    layers: tuple[str, ...]
    cache_bits: int = 16
    key_order: bool = False
    positions: FarPositions | None = None

    @classmethod
    def uniform(
        cls, mixer: type[LayerKind], settings: MixerSettings, num_layers: int, softmax: Collection[int] = ()
    ) -> LayerTable:
        """One kind everywhere, but for the layers in `softmax`."""
        name = mixer.in_tables
        layers = tuple(SOFTMAX if index in softmax else name for index in range(num_layers))
        return cls({name: Kind(mixer, settings)}, layers)

    @classmethod
    def by_heads(
        cls,
        mixer: type[LayerKind],
        settings: Any,
        num_layers: int,
        num_heads: int,
        softmax: Collection[tuple[int, int]],
    ) -> LayerTable:
        """One kind for every key/value head, but for those in `softmax`.

        Layers whose heads are all of one kind are as in `uniform`; the others have mixed heads, and layers with the
        same softmax heads share a kind.

        Args:
            mixer, settings: a mixer with a recurrent state or the window, and its settings.
            num_heads: the number of key/value heads of a layer.
            softmax: (layer, key/value head).
        """
        others = Kind(mixer, settings)
        kinds: dict[str, Kind] = {}
        layers = []
        for index in range(num_layers):
            heads = [head for head in range(num_heads) if (index, head) in softmax]
            if len(heads) == num_heads:
                layers.append(SOFTMAX)
                continue
            layers.append("_".join(["heads", *map(str, heads)]) if heads else mixer.in_tables)
            kinds[layers[-1]] = others.with_softmax_heads(num_heads, heads) if heads else others
        return cls(kinds, tuple(layers))

    def with_windows(self, windows: Sequence[int]) -> LayerTable:
        """The same kinds with windows of so many tokens, by layer; names of kinds end with the number."""
        kinds: dict[str, Kind] = {}
        layers = []
        for name, window in zip(self.layers, windows, strict=True):
            layers.append(name if name == SOFTMAX else f"{name}_{window}")
            if name != SOFTMAX:
                kinds[layers[-1]] = self.kinds[name].with_window(window)
        return replace(self, kinds=kinds, layers=tuple(layers))

    @classmethod
    def preset(
        cls,
        num_layers: int,
        mixer: str = "gated_deltanet",
        profile: str = "faithful",
        softmax: Collection[int] = (),
        teacher: PreTrainedConfig | None = None,
        **changes: Any,
    ) -> LayerTable:
        """One mixer with its recommended settings for training everywhere, but for the layers in `softmax`.

        Args:
            mixer: a name in `MIXER_NAMES`.
            profile, teacher: see `recommended`.
            changes: single settings that differ from the recommended ones.

        Raises:
            ValueError: an unknown mixer, profile or setting, or a setting with a wrong value.
        """
        kind, defaults = recommended(mixer, profile, True, teacher, changes.get("delayed", True))
        settings = {**defaults.to_dict(), **changes}
        return cls.uniform(kind, kind.Settings.from_dict(settings, mixer), num_layers, softmax)

    @classmethod
    def from_dict(cls, values: Any, num_layers: int) -> LayerTable:
        """Read a config's `deltanet` entry.

        Raises:
            ValueError: naming the key that is missing, unknown or wrong.
        """
        needed, optional = {"kinds", "layers"}, {"cache_bits", "key_order", "positions"}
        if not isinstance(values, Mapping) or set(values) - optional != needed:
            keys = f"keys {sorted(values)}" if isinstance(values, Mapping) else repr(values)
            raise ValueError(f"deltanet: got {keys}, expected `kinds` and `layers`; convert the model again")
        kinds, layers = values["kinds"], values["layers"]
        if not isinstance(kinds, Mapping):
            raise ValueError(f"deltanet.kinds: got {kinds!r}, expected settings by name")
        known = {name: _kind(name, kind) for name, kind in kinds.items()}
        if not isinstance(layers, (list, tuple)) or len(layers) != num_layers:
            found = len(layers) if isinstance(layers, (list, tuple)) else repr(layers)
            raise ValueError(f"deltanet.layers: got {found} names, but the model has {num_layers} layers")
        for index, name in enumerate(layers):
            if name != SOFTMAX and name not in known:
                choices = ", ".join([SOFTMAX, *known])
                raise ValueError(f"deltanet.layers: layer {index} is {name!r}, expected one of {choices}")
        bits = values.get("cache_bits", 16)
        if type(bits) is not int or bits not in BITS:
            raise ValueError(f"deltanet.cache_bits: got {bits!r}, expected one of {', '.join(map(str, BITS))}")
        ordered = values.get("key_order", False)
        if type(ordered) is not bool:
            raise ValueError(f"deltanet.key_order: got {ordered!r}, expected true or false")
        positions = FarPositions.from_dict(values["positions"]) if "positions" in values else None
        return cls(known, tuple(layers), bits, ordered, positions)

    @classmethod
    def of(cls, config: Any) -> LayerTable:
        """The table of a converted model's config."""
        return cls.from_dict(config.deltanet, config.num_hidden_layers)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as it stands in config.json."""
        table = {"kinds": {name: kind.to_dict() for name, kind in self.kinds.items()}, "layers": list(self.layers)}
        bits = {} if self.cache_bits == 16 else {"cache_bits": self.cache_bits}
        positions = {} if self.positions is None else {"positions": asdict(self.positions)}
        return table | bits | ({"key_order": True} if self.key_order else {}) | positions

    def __getitem__(self, index: int) -> Kind | None:
        """The kind of a layer; None for softmax."""
        return self.kinds.get(self.layers[index])

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def converted(self) -> dict[int, Kind]:
        """The kinds of the layers that are not softmax, by index."""
        return {index: self.kinds[name] for index, name in enumerate(self.layers) if name != SOFTMAX}

    @property
    def softmax(self) -> list[int]:
        """Indices of the layers that keep the teacher's softmax attention."""
        return [index for index, name in enumerate(self.layers) if name == SOFTMAX]

    @property
    def only_kind(self) -> Kind:
        """The one kind of all converted layers.

        Raises:
            ValueError: there is none, or more than one.
        """
        found = list(dict.fromkeys(name for name in self.layers if name != SOFTMAX))
        if len(found) != 1:
            raise ValueError(f"deltanet.layers: got the kinds {found}, expected one beside softmax")
        return self.kinds[found[0]]


def layer_kinds(model: PreTrainedModel) -> Iterator[tuple[int, LayerKind]]:
    """The layers of a model that are not its family's own attention, with the indices of their decoder layers."""
    for index, layer in enumerate(decoder_layers(model)[: model.config.num_hidden_layers]):
        for part in kinds_among(layer.children()):
            yield index, part


def layers_with_states(model: Any) -> list[Any]:
    """The layers, and branches of layers, with a recurrent state, in order."""
    branches = (branch for _, kind in layer_kinds(model) for branch in kind.branches.values())
    return [branch for branch in branches if kind_of(branch).has_state]


def _kind(name: Any, values: Any) -> Kind:
    where = f"deltanet.kinds.{name}"
    if not isinstance(name, str) or name == SOFTMAX:
        raise ValueError(f"deltanet.kinds: {name!r} cannot be the name of a kind")
    if not isinstance(values, Mapping) or not isinstance(values.get("mixer"), str):
        raise ValueError(f"{where}.mixer: missing key; it names one of {', '.join(MIXERS)}")
    mixer = MIXERS.get(values["mixer"])
    if mixer is None:
        raise ValueError(f"{where}.mixer: got {values['mixer']!r}, expected one of {', '.join(MIXERS)}")
    settings = {key: value for key, value in values.items() if key != "mixer"}
    return Kind(mixer, mixer.Settings.from_dict(settings, where))
