"""Runs a causal language model's decoder layer by layer, for every supported family.

Families differ in what they pass to a decoder layer: masks per kind of layer, rotary embeddings, flags. Instead of
repeating that logic, the model's own forward runs once with recorders in place of its layers. It embeds the tokens and
builds masks and rotary embeddings; each recorder keeps the arguments that its layer would have received. The caller
then runs the layers itself.

The converter uses this to hold one layer in memory at a time, training to reach the hidden states between layers.
Only the entry is shared. Loading a layer from disk and computing with weights as stored belong to the converter
(`deltanet_convert/layer_stream.py`); gradient checkpointing, autocast and packed documents belong to training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class LayerInputs:
    """The input of the first decoder layer, [batch, tokens, hidden], and the keyword arguments of each layer."""

    hidden: Tensor
    kwargs: list[dict[str, Any]]


class LayerwiseDecoder:
    """Enters the decoder of `model` and hands its layers' arguments to the caller.

    Args:
        model: a causal language model of a supported family, with its decoder in `model.model`. Its layers may be on
            the meta device: they are not run here.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder: Any = model.model
        self._decoder = decoder
        self.layers: list[nn.Module] = list(decoder.layers)
        self._recorders = nn.ModuleList([_Recorder(layer) for layer in self.layers])

    def enter(self, **inputs: Any) -> LayerInputs:
        """Runs everything that the decoder does before its first layer.

        Args:
            inputs: keyword arguments of the decoder's forward, such as `input_ids` or `inputs_embeds`.

        The model is unchanged afterwards, also after an error.
        """
        layers, final_norm = self._decoder.layers, self._decoder.norm
        self._decoder.layers, self._decoder.norm = self._recorders, nn.Identity()
        try:
            hidden = self._decoder(**inputs, use_cache=False).last_hidden_state
        finally:
            self._decoder.layers, self._decoder.norm = layers, final_norm
        return LayerInputs(hidden, [recorder.kwargs for recorder in self._recorders])  # type: ignore[misc]


class _Recorder(nn.Module):
    """Takes the place of a decoder layer: keeps the arguments and returns the hidden states unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple, so that the layer does not become a submodule
        self.kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some decoders read attributes of their layers, such as the kind of attention
            return getattr(self._layer[0], name)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        return hidden_states
