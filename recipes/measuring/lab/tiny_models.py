"""The models that take part: tiny Llamas whose layers are all of one mixer, with weights from scratch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from deltanet_convert.options import ConvertOptions
from deltanet_hf import LayerTable, converted_config
from deltanet_hf.errors import UserError
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.layers import SOFTMAX, layers_with_states

NO_POSITIONS = {"rope": False, "k_offset": False, "delayed": False}
"""Settings of every mixer that has them: a position tells nothing in these tasks, no key is centred, and a state beside
a window, whose keys have no positions either, reads every token."""


@dataclass(frozen=True)
class MixerChoice:
    """A mixer and the settings that differ from the laboratory's.

    Args:
        label: NAME or NAME:KEY=VALUE,KEY=VALUE, as it was given.
    """

    label: str

    @property
    def mixer(self) -> str:
        return self.label.partition(":")[0]

    @property
    def changes(self) -> tuple[str, ...]:
        """The settings after the name, as `deltanet-hf convert --set` takes them."""
        _, colon, settings = self.label.partition(":")
        return tuple(settings.split(",")) if colon else ()

    def table(self, layers: int, common: Mapping[str, Any]) -> LayerTable:
        """One kind of layer everywhere; "softmax" is the attention of Llama.

        Args:
            common: settings for every mixer that has them and is not given others.

        Raises:
            UserError: an unknown mixer or key, or a wrong value.
        """
        if self.mixer == SOFTMAX:
            if self.changes:
                raise UserError(f"--mixer {self.label}: softmax has no settings; write --mixer softmax")
            return LayerTable({}, (SOFTMAX,) * layers)
        try:
            plain = ConvertOptions(mixer=self.mixer, cache_bits=16).table(1, ())
            known = {field.name for field in fields(plain.only_kind.settings)}
            given = {entry.partition("=")[0] for entry in self.changes}
            added = [f"{key}={json.dumps(value)}" for key, value in common.items() if key in known - given]
            return ConvertOptions(mixer=self.mixer, changes=(*added, *self.changes), cache_bits=16).table(layers, ())
        except UserError as error:
            raise UserError(f"--mixer {self.label}: {str(error).removeprefix('--mixer: ')}") from None


def tiny_model(table: LayerTable, vocabulary: int, width: int, heads: int, head_dim: int, seed: int) -> PreTrainedModel:
    """A Llama with weights from scratch, which depend on `seed` alone, in float32 on the CPU.

    Args:
        width: of the residual stream.
        head_dim: K = V of every state; Llama's rotary embedding asks for an even number.
    """
    if head_dim % 2:
        raise UserError(f"--head-dim {head_dim}: expected an even number")
    spread = width**-0.5
    config: Any = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=len(table),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        initializer_range=spread,
        tie_word_embeddings=False,
        max_position_embeddings=1 << 16,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class("llama")(converted_config(config, table))
        for layer in layers_with_states(model):
            layer.start_from_scratch(spread)
    return model
