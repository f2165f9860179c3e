"""The contract of a kind of layer: what the cache, the converter and the recipes ask of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.protocol import CacheLayer, TensorShape
from deltanet_hf.mixers.cache.quantised_cache_spec import held_bytes
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.settings import MixerSettings

PositionEmbeddings = tuple[Tensor, Tensor]
"""cos and sin, each [B, T, R] or [1, T, R], as transformers hands them to attention."""


class LayerKind:
    """The contract of a kind of layer. The classes in `MIXERS` derive from it and from `nn.Module`."""

    name: ClassVar[str]
    """Its name in config.json and for `deltanet-hf convert --mixer`."""
    title: ClassVar[str]
    """Its name for people."""
    Settings: ClassVar[type[MixerSettings]]
    fp32: ClassVar[tuple[str, ...]] = ()
    """Last names of the parameters that are float32 whatever the model's dtype."""
    new_weights: ClassVar[bool] = True
    """Whether it has weights that the teacher does not have: recipes align such layers and train them in full.
    Otherwise its weights are the teacher's, and recipes treat them as those of softmax attention."""
    has_state: ClassVar[bool] = False
    """Whether it is a mixer with a recurrent state, which may stand beside a window and for some heads of a layer."""
    keeps_all_tokens: ClassVar[bool] = False
    """Whether it is the family's attention to all tokens, with or without something added."""
    state_beside_keys: ClassVar[bool] = False
    """Whether it keeps a state of constant size beside the keys and values of all tokens."""
    reads_further: ClassVar[bool] = False
    """Whether it can stand in a model that has more positions than the teacher (`models/far_positions.py`)."""
    may_delay: ClassVar[bool] = False
    """Whether its state beside a window may hold what has left the window, instead of every token."""
    rearranges_weights: ClassVar[bool] = False
    """Whether it has the teacher's weights in other places or other numbers: a conversion checks them through softmax
    attention (`deltanet_convert/compare_to_teacher.py`)."""
    in_tables: ClassVar[str] = "linear"
    """How a layer table names a kind that is made of it."""
    without_lora: ClassVar[tuple[str, ...]] = ()
    """Last names of its linear layers that are smaller than an adapter would be."""

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> MixerSettings:
        """The recommended settings.

        Args:
            profile: "faithful" keeps everything that the teacher's attention has; "qwen3_5" is the layer of Qwen3.5.
            training: whether the converted model will be distilled; False asks for the better start.

        Raises:
            ValueError: this kind of layer has no such profile.
        """
        cls.only_faithful(profile)
        return cls.Settings()

    @classmethod
    def only_faithful(cls, profile: str) -> None:
        """Raises ValueError for another profile."""
        if profile != "faithful":
            hint = "; for the layer of Qwen3.5 take the mixer gated_deltanet" if profile == "qwen3_5" else ""
            raise ValueError(f"profile: got {profile!r}, but {cls.name} has only faithful{hint}")

    @classmethod
    def recurrent_settings(cls, settings: Any) -> Any:
        """The settings of the mixer with a recurrent state in a layer with `settings`; None without one."""
        return None

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        """The layer that takes the place of `attention`, the module that the family's own constructor made."""
        raise NotImplementedError

    cache_class: ClassVar[type[MixerCacheLayer]] = MixerCacheLayer
    """The class of its part of a cache."""

    takes_prompt_length: bool = False
    """Whether calls take `prompt_length`, see `FastDecoder`."""

    def place_cache(self, cache: Cache) -> CacheLayer | None:
        """This layer's part of `cache`, made if there is none yet; None where it is a key/value layer."""
        return None

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        """The state of one sequence, as it is kept in the cache of a model of this dtype."""
        raise NotImplementedError

    def largest_counts(self) -> dict[str, int]:
        """The largest values of counts in the state; other integers are at most the number of tokens."""
        return {}

    @property
    def full_title(self) -> str:
        """Its name for people, with what the layer's own settings add to it."""
        return self.title

    @property
    def branches(self) -> dict[str, Any]:
        """The layers whose sum it is, by their names in it; most kinds are their own only branch, under the name ""."""
        return {"": self}

    @property
    def branch_heads(self) -> dict[str, Any]:
        """The key/value heads of each branch, as an index of a tensor of all."""
        return {"": slice(None)}

    def part_of(self, attention: Any, branch: str) -> nn.Module:
        """The part of a complete softmax attention, weights included, that a branch replaces."""
        return attention  # type: ignore[no-any-return]

    @property
    def softmax_parts(self) -> list[tuple[Any, int]]:
        """The modules that keep keys and values for softmax attention, and their numbers of key/value heads."""
        config: Any = self.config  # type: ignore[attr-defined]
        return [(self, int(config.num_key_value_heads))]

    @property
    def window_tokens(self) -> int | None:
        """The window that it has in place of softmax attention to all tokens, or beside its state; None without one."""
        return None

    @property
    def sink_reach(self) -> int:
        """Tokens of a text all of whose sinks are in the window of the last one, at most; of kinds with a window."""
        raise NotImplementedError

    def use_window(self, tokens: int) -> None:
        """Give the window that it has in place of softmax attention another length; other kinds stay as they are."""

    def start_neutral(self, spread: float) -> None:
        """Give new parameters values with which it computes what the teacher's attention does, as far as it can.

        Args:
            spread: standard deviation of the family's projections in training from scratch.
        """

    def use_cache_bits(self, bits: int) -> None:
        """Let the keys and values that it keeps have this many bits in the cache.

        Raises:
            UserError: it keeps some that always have 16.
        """
        if bits < 16:
            raise UserError(f"cache bits: {self.name} layers keep every token in 16 bits; leave it at 16")

    @property
    def growing_heads(self) -> int:
        """Number of key/value heads that keep the keys and values of all tokens."""
        return 0

    def extra_channels(self, dtype: torch.dtype) -> int:
        """Numbers of this dtype that each of the `growing_heads` keeps per token beside its key and value."""
        return 0

    def new_parts(self) -> list[nn.Module]:
        """The modules with weights that the teacher does not have, see `new_weights`: all of it, or some branches."""
        assert isinstance(self, nn.Module)
        return [self] if self.new_weights else []

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the state of one sequence, the same at any length; keys and values that grow are not in it."""
        return sum(shape.nbytes for shape in self.state_shapes(dtype).values())

    def stored_bytes(self, dtype: torch.dtype, tokens: int, bits: int) -> int:
        """Bytes of one sequence of `tokens` tokens whose keys and values have `bits` bits."""
        return self.state_bytes(dtype)


def softmax_bytes(attention: Any, dtype: torch.dtype, tokens: int, bits: int) -> int:
    """`LayerKind.stored_bytes` of a family's attention."""
    config: Any = attention.config
    family_window = sliding_window(config, attention.layer_idx)
    sizes = int(config.num_key_value_heads), int(attention.head_dim)
    return held_bytes(*sizes, tokens, bits, dtype, None, 0, family_window)


def own_kind(module: Any) -> LayerKind | None:
    """The module, if it is a kind of layer; None for a family's own."""
    return module if isinstance(module, LayerKind) else None


def kinds_among(modules: Iterable[nn.Module]) -> Iterator[LayerKind]:
    """Those of some modules that are not their family's own."""
    return (kind for module in modules if (kind := own_kind(module)) is not None)


def branches_of(attention: nn.Module) -> dict[str, Any]:
    """`LayerKind.branches` of a decoder layer's attention, which may be the family's own."""
    kind = own_kind(attention)
    return {"": attention} if kind is None else kind.branches
