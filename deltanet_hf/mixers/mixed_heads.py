"""A layer whose key/value heads are of different kinds: softmax, window, or a mixer with a recurrent state.

The layer is a sum of narrower layers (`attention/head_split.py`), one per kind that occurs, each with the query heads
that share its key/value heads. The branch `softmax` is the family's own attention and keeps the keys and values of all
tokens; `window` is the same under a window with sinks (`window.py`); `linear` is a mixer with a recurrent state. Each
branch has its own part of the layer's cache (`cache/mixed_cache.py`). Weight names are those of the branches, as
`self_attn.softmax.q_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.head_split import narrow_attention, narrow_weights
from deltanet_hf.mixers.cache.argument import CACHE, given_cache
from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer, mixed_cache_layer
from deltanet_hf.mixers.cache.state import TensorShape
from deltanet_hf.mixers.layer.layer_kind import LayerKind, PositionEmbeddings
from deltanet_hf.mixers.layer.settings import MixerSettings, check_choice
from deltanet_hf.mixers.window import WindowAttention, WindowSettings

Head = Literal["softmax", "window", "linear"]
BRANCHES: tuple[Head, ...] = get_args(Head)


@dataclass(frozen=True)
class MixedHeadsSettings(MixerSettings):
    """Which kind each key/value head is of, and the settings of the kinds."""

    mixers: ClassVar[Mapping[str, type[LayerKind]]]
    """`MIXERS`, which has a row for mixed heads and sets this."""

    heads: tuple[Head, ...]  # one per key/value head
    window: int = 64  # of the heads that are windows
    sinks: int = 4
    linear_mixer: str = "gated_deltanet"  # of the heads that are linear: a name in `MIXERS`
    linear: Any = None  # the settings of that mixer, where there are such heads

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "deltanet") -> MixedHeadsSettings:
        """As in the base class; the mixer's settings are read too."""
        read = dict(values)
        if isinstance(read.get("heads"), list):
            read["heads"] = tuple(read["heads"])
        if isinstance(read.get("linear"), Mapping):
            mixer = _linear_mixer(read.get("linear_mixer", cls.linear_mixer), where)
            read["linear"] = mixer.Settings.from_dict(read["linear"], f"{where}.linear")
        return super().from_dict(read, where)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "heads": list(self.heads)}

    def validate(self, where: str) -> None:
        if not isinstance(self.heads, tuple) or not self.heads:
            kinds = ", ".join(BRANCHES)
            raise ValueError(f"{where}.heads: got {self.heads!r}, expected a list: {kinds} per key/value head")
        for index, head in enumerate(self.heads):
            check_choice(where, f"heads[{index}]", head, BRANCHES)
        WindowSettings(self.window, self.sinks).validate(where)
        mixer = _linear_mixer(self.linear_mixer, where)
        if "linear" in self.heads and not isinstance(self.linear, mixer.Settings):
            raise ValueError(f"{where}.linear: got {self.linear!r}, expected the settings of {self.linear_mixer}")

    def with_window(self, window: int) -> MixedHeadsSettings:
        linear = None if self.linear is None else self.linear.with_window(window)
        return replace(self, window=window, linear=linear)

    def indices(self, kind: Head) -> list[int]:
        """The key/value heads of one kind, ascending."""
        return [index for index, head in enumerate(self.heads) if head == kind]

    @property
    def branches(self) -> dict[Head, list[int]]:
        """The kinds that occur and their key/value heads, in the order of `BRANCHES`."""
        return {kind: self.indices(kind) for kind in BRANCHES if kind in self.heads}


def _linear_mixer(name: Any, where: str) -> type[LayerKind]:
    known = {name: kind for name, kind in MixedHeadsSettings.mixers.items() if kind.has_state}
    check_choice(where, "linear_mixer", name, tuple(known))
    return known[name]


class MixedHeads(LayerKind, nn.Module):
    """See the module's docstring. The branches are the submodules `softmax`, `window` and `linear`, or None.

    Args:
        attention: the attention that the family's constructor made; its weights are not taken over.
        config: the model's configuration.
        layer_idx: index of the decoder layer.
        settings: its settings.

    Raises:
        ValueError: the number of heads is not the model's.
        UserError: the family's attention cannot be split by heads.
    """

    name: ClassVar[str] = "mixed_heads"
    title: ClassVar[str] = "mixed heads"
    Settings: ClassVar[type[MixerSettings]] = MixedHeadsSettings
    rearranges_weights: ClassVar[bool] = True

    softmax: Any
    window: Any
    linear: Any

    def __init__(self, attention: Any, config: PreTrainedConfig, layer_idx: int, settings: MixedHeadsSettings) -> None:
        super().__init__()
        if len(settings.heads) != config.num_key_value_heads:
            raise ValueError(
                f"heads: lists {len(settings.heads)} kinds, but layer {layer_idx} has {config.num_key_value_heads} "
                "key/value heads; list one kind per key/value head"
            )
        self.settings, self.layer_idx = settings, layer_idx
        found = settings.branches
        self.kinds = tuple(found)
        for kind in BRANCHES:
            branch = None
            if kind in found:
                bias = kind == self.kinds[0]
                narrow: Any = narrow_attention(attention, config, layer_idx, found[kind], bias)
                branch = _branch(kind, narrow, layer_idx, settings)
            self.register_module(kind, branch)

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixedHeadsSettings:
        """As in the base class, but without `heads`, which follow from the model."""
        cls.only_faithful(profile)
        mixer = MixedHeadsSettings.linear_mixer
        return MixedHeadsSettings((), linear=_linear_mixer(mixer, cls.name).default_settings(profile, training))

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        return cls(attention, config, layer_idx, settings)

    @classmethod
    def recurrent_settings(cls, settings: MixedHeadsSettings) -> Any:
        return settings.linear if "linear" in settings.heads else None

    @property
    def branches(self) -> dict[str, Any]:
        return {kind: getattr(self, kind) for kind in self.kinds}

    @property
    def branch_heads(self) -> dict[str, Any]:
        return {kind: heads for kind, heads in self.settings.branches.items()}

    @property
    def full_title(self) -> str:
        parts = zip(self._kinds.values(), self.settings.branches.values(), strict=True)
        return f"{self.title}: {', '.join(f'{kind.full_title} ({len(heads)})' for kind, heads in parts)}"

    @property
    def _kinds(self) -> dict[str, LayerKind]:
        return {name: kind_of(branch) for name, branch in self.branches.items()}

    @property
    def softmax_parts(self) -> list[tuple[Any, int]]:
        return [part for kind in self._kinds.values() for part in kind.softmax_parts]

    def use_cache_bits(self, bits: int) -> None:
        for kind in self._kinds.values():
            kind.use_cache_bits(bits)

    def use_window(self, tokens: int) -> None:
        for kind in self._kinds.values():
            kind.use_window(tokens)

    def stored_bytes(self, dtype: torch.dtype, tokens: int, bits: int) -> int:
        return sum(kind.stored_bytes(dtype, tokens, bits) for kind in self._kinds.values())

    @property
    def growing_heads(self) -> int:
        return len(self.settings.indices("softmax"))

    def part_of(self, attention: Any, branch: str) -> nn.Module:
        """As in the base class, without gradients; the outputs of all parts sum to that of `attention`."""
        heads = self.settings.branches[branch]  # type: ignore[index]
        with torch.device("meta"):
            part = narrow_attention(attention, attention.config, self.layer_idx, heads, branch == self.kinds[0])
        part.load_state_dict(narrow_weights(attention, part, heads), assign=True)
        return part.train(attention.training).requires_grad_(False)

    def new_parts(self) -> list[nn.Module]:
        return [] if self.linear is None else [self.linear]

    @property
    def takes_prompt_length(self) -> bool:  # type: ignore[override]
        return all(getattr(branch, "takes_prompt_length", True) for branch in self.branches.values())

    def place_cache(self, cache: Cache) -> MixedCacheLayer:
        # Softmax heads have a class where they keep their part of the cache themselves: packed, or under a window.
        classes = {kind: getattr(branch, "cache_class", None) for kind, branch in self.branches.items()}
        return mixed_cache_layer(cache, self.layer_idx, classes)

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        """As in the base class, of the branches `window` and `linear`, with their names before those of the tensors."""
        return {
            f"{kind}.{name}": shape
            for kind, branch in self._kinds.items()
            for name, shape in branch.state_shapes(dtype).items()
        }

    def largest_counts(self) -> dict[str, int]:
        return {
            f"{kind}.{name}": most
            for kind, branch in self._kinds.items()
            for name, most in branch.largest_counts().items()
        }

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: PositionEmbeddings | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], None)."""
        branches = self.branches
        parts: dict[str, Any] = dict.fromkeys(branches)
        cache = given_cache(past_key_values, kwargs)
        if cache is not None:
            layer = self.place_cache(cache)
            parts |= layer.parts
            for kind, part in layer.parts.items():
                if part is layer.growing:  # the family's attention calls `Cache.update`, which also offloads
                    parts[kind] = cache
        outputs = [
            branch(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **{CACHE: parts[kind]},
                **kwargs,
            )[0]
            for kind, branch in branches.items()
        ]
        total: Tensor = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total, None


def _branch(kind: Head, narrow: Any, layer_idx: int, settings: MixedHeadsSettings) -> nn.Module:
    """The branch of one kind in the place of `narrow`, the family's attention for its heads."""
    if kind == "softmax":
        return narrow  # type: ignore[no-any-return]
    if kind == "window":
        sizes = WindowSettings(settings.window, settings.sinks)
        return WindowAttention.from_attention(narrow, narrow.config, layer_idx, sizes)
    mixer = _linear_mixer(settings.linear_mixer, "deltanet")
    return mixer.from_attention(narrow, narrow.config, layer_idx, settings.linear)
