"""The contract of a kind of layer: what the cache, the converter and the recipes ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.mixers.settings import MixerSettings

PositionEmbeddings = tuple[Tensor, Tensor]
"""cos and sin, each [B, T, R] or [1, T, R], as transformers hands them to attention."""


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of one tensor of a state, for one sequence (without the batch)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


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
        raise NotImplementedError

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        """The layer that takes the place of `attention`, the module that the family's own constructor made."""
        raise NotImplementedError

    def place_cache(self, cache: Cache) -> None:
        """Make this layer's part of `cache`, which its first call makes otherwise; key/value layers exist already."""

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
