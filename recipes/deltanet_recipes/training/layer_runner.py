"""Runs a causal language model's decoder layer by layer, for every supported family.

`LayerwiseDecoder` embeds the tokens and collects the arguments of each layer; the layers are then called from here.
That gives access to every hidden state without hooks, keeps host synchronisation out of captured CUDA graphs, and lets
a model run with only one layer at a time on the GPU.

Shapes: R rows, L tokens per row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from deltanet_hf.models.decoder import LayerInputs, LayerwiseDecoder
from deltanet_recipes.data.packing import Rows
from deltanet_recipes.training.model_pair import decoder_layers

DOCUMENT_TOKENS = (128, 32, 8, 1)
"""Average lengths of packed documents for which `document_boundaries` has room."""


class LayerRunner:
    """Calls the decoder layers of `model` one after the other.

    Args:
        model: a causal language model of a supported family, converted or not.
        checkpointing: recompute each layer's activations in the backward pass.
    """

    def __init__(self, model: nn.Module, checkpointing: bool = False) -> None:
        self.model, self.checkpointing = model, checkpointing
        self._decoder = LayerwiseDecoder(model)

    def embed(self, rows: Rows, cu_seqlens: torch.Tensor | None) -> LayerInputs:
        """Embed rows and collect the arguments of each layer.

        Args:
            cu_seqlens: [N + 1] int32, boundaries of packed documents over the R*L tokens (`document_boundaries`), or
                None if no row holds more than one document.
        """
        if cu_seqlens is None:
            # Without a cache, transformers looks for document boundaries, and waits for the device to do so.
            entry = self._decoder.enter(input_ids=rows.input_ids, past_key_values=DynamicCache())
            entry = LayerInputs(entry.hidden, [{**kwargs, "past_key_values": None} for kwargs in entry.kwargs])
        else:
            packing = {"position_ids": rows.position_ids, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            entry = self._decoder.enter(input_ids=rows.input_ids, **packing)
        return _in_autocast_dtype(entry)

    def run_layers(self, entry: LayerInputs, keep: bool = True) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the hidden states after the final norm and those after each layer, all [R, L, D].

        Args:
            keep: without it, the list of the states after each layer is empty, and each is freed as soon as the next
                layer has run (unless its gradient is needed).
        """
        hidden, states = entry.hidden, []
        for layer, kwargs in zip(self._decoder.layers, entry.kwargs, strict=True):
            hidden = self.run_layer(layer, hidden, kwargs)
            if keep:
                states.append(hidden)
        decoder: Any = self.model.model
        return decoder.norm(hidden), states

    @property
    def output_weight(self) -> torch.Tensor:
        """The output matrix [V, D]."""
        return self.model.get_output_embeddings().weight  # type: ignore[operator, no-any-return]

    def run_layer(self, layer: nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """The output [R, L, D] of one decoder layer."""
        return recomputed(layer, hidden, **kwargs) if self.checkpointing else layer(hidden, **kwargs)


def recomputed(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of a call whose intermediate results are not kept, but computed again in the backward pass, if any.

    Nothing in it draws random numbers. The state of their generator is not read, which a CUDA graph forbids.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)  # type: ignore[no-any-return]


def document_boundaries(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Document boundaries [N + 1] int32 over the flattened rows; None if no row of [R, L] holds a second document.

    The last boundary is repeated (empty sequences) up to one of few lengths, which are shapes of compiled code and of
    CUDA graphs: one for all rows of a shape whose documents have `DOCUMENT_TOKENS[0]` tokens on average or more. Every
    boundary takes memory, because the operators make room for an incomplete chunk behind each.
    """
    starts = (position_ids.flatten() == 0).nonzero().flatten().to(torch.int32)
    rows, length = position_ids.shape
    if len(starts) == rows:
        return None
    rooms = (rows + rows * length // tokens for tokens in DOCUMENT_TOKENS)
    room = next(room for room in rooms if len(starts) <= room)
    return torch.cat([starts, starts.new_full((room + 1 - len(starts),), rows * length)])


def _in_autocast_dtype(entry: LayerInputs) -> LayerInputs:
    """Cast float32 inputs to the autocast dtype.

    Float32 embeddings would give a float32 residual stream and float32 rotary embeddings, so that the dtype of q would
    differ from that of v.
    """
    device = entry.hidden.device.type
    if not torch.is_autocast_enabled(device) or entry.hidden.dtype != torch.float32:
        return entry
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

    return LayerInputs(cast(entry.hidden), pytree.tree_map_only(torch.Tensor, cast, entry.kwargs))


class AttentionTaps:
    """Records the arguments and the output of `self_attn` in the chosen layers while the model runs."""

    def __init__(self, model: nn.Module, indices: list[int]) -> None:
        self.inputs: dict[int, dict[str, Any]] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        layers = decoder_layers(model)
        self._handles = [
            layers[index].self_attn.register_forward_hook(self._hook(index), with_kwargs=True)  # type: ignore[union-attr]
            for index in indices
        ]

    def _hook(self, index: int) -> Any:
        def record(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            self.inputs[index] = kwargs if not args else {"hidden_states": args[0], **kwargs}
            self.outputs[index] = output[0]

        return record

    def clear(self) -> None:
        self.inputs.clear()
        self.outputs.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.clear()


def mixer_output(mixer: nn.Module, tap: dict[str, Any], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The output [R, L, D] of a mixer for the arguments (`tap`) that the teacher's attention received."""
    output, _ = mixer(
        hidden_states=tap["hidden_states"].detach(),
        position_embeddings=tap.get("position_embeddings"),
        cu_seq_lens_q=cu_seqlens,
    )
    return output  # type: ignore[no-any-return]
