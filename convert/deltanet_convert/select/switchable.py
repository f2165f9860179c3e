"""A teacher whose layers and key/value heads can each be switched between full attention and a window with sinks.

Only masks differ; what a family does in its attention (capped scores, learned norms, no rotary embedding) stays as it
is. In a teacher with positions beyond its own (`place_positions`), full attention has these and windows the teacher's;
a layer with both is computed twice. A forward pass can begin at a later layer with the activations of an earlier pass,
because the layers below the first one that is switched compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltanet_hf.mixers.layer.masks import sliding_window

from .units import Candidates, Unit

MASK_BYTES = 10**9  # of the masks that are kept for the next pass


class SwitchableModel:
    """Takes over the layers of `model`, which must not be used for anything else afterwards.

    Args:
        model: a teacher with attn_implementation "sdpa" or "eager", in eval mode.
        candidates: the units that can be switched; layers with a sliding window of their own are left alone.
        window: tokens that a restricted head sees, itself included.
        sinks: tokens at the start of the row that it sees besides.
    """

    def __init__(self, model: PreTrainedModel, candidates: Candidates, window: int, sinks: int) -> None:
        self.model, self.candidates, self.sinks = model, candidates, sinks
        config: Any = model.config
        self.config = config
        self.kv_heads = int(config.num_key_value_heads)
        self.groups = int(config.num_attention_heads) // self.kv_heads
        decoder: Any = model.model
        self.layers = decoder.layers
        self.windows: Sequence[int] = [window] * len(self.layers)  # by layer
        self.full = torch.ones(len(self.layers), self.kv_heads, dtype=torch.bool)
        self.gates: Tensor | None = None  # [L, KV] float, while derivatives are taken (`blended`)
        self.others: Sequence[int] | None = None  # windows that gates lead to, by layer; None for all tokens
        self._first = 0
        self._saved: list[Tensor | None] = [None] * len(self.layers)
        self._recording = False
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        switched = {unit[0] for unit in candidates.units}
        for index, layer in enumerate(self.layers):
            layer.forward = self._layer_forward(index, layer.forward)
            if index in switched:
                layer.self_attn.forward = self._attention_forward(index, layer.self_attn)

    def keep(self, units: Collection[Unit]) -> None:
        """Gives full attention to these units, and the window to all other candidates."""
        for unit in self.candidates.units:
            self.full[unit] = False
        for unit in units:
            self.full[unit] = True

    def keep_all(self) -> None:
        """Makes the model the teacher again."""
        self.full.fill_(True)

    def logits(self, ids: Tensor, positions: Tensor, *, record: bool = False) -> Tensor:
        """Logits [B, R, V] at the positions [R] of rows [B, T]; `record` keeps each layer's input."""
        self._first, self._recording = 0, record
        return self._run(ids, positions)

    def logits_from(self, layer: int, ids: Tensor, positions: Tensor) -> Tensor:
        """As `logits`, beginning at `layer` with its input in the last recorded pass over the same rows."""
        self._first, self._recording = layer, False
        return self._run(ids, positions)

    def forget(self) -> None:
        """Frees the recorded activations."""
        self._saved = [None] * len(self.layers)

    def _run(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False, logits_to_keep=positions).logits
        return logits

    def _layer_forward(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if index < self._first:
                return hidden_states
            if index == self._first and index > 0:
                recorded = self._saved[index]
                assert recorded is not None
                hidden_states = recorded
            if self._recording:
                self._saved[index] = hidden_states
            return forward(hidden_states, *args, **kwargs)

        return run

    def _attention_forward(self, index: int, attention: Any) -> Callable[..., Any]:
        forward = attention.forward

        def run(
            *, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None = None, **kwargs: Any
        ) -> Any:
            def masked(full: Tensor, window: int) -> Any:
                whole = bool(full.all())
                return forward(
                    hidden_states=hidden_states,
                    attention_mask=attention_mask if whole else self._mask(index, full, window, hidden_states),
                    position_embeddings=position_embeddings if whole else position_embeddings[:2],
                    **kwargs,
                )

            full, window = self.full[index], self.windows[index]
            other = window if self.others is None else self.others[index]
            alike = len(position_embeddings) == 2 or bool((full == full[0]).all())
            if alike and (self.gates is None or (self.others is not None and other == window)):
                return masked(full, window)
            gates = full.to(hidden_states) if self.gates is None else self.gates[index]
            ends = (torch.zeros_like(full), torch.ones_like(full)) if self.others is None else (full, full)
            return blended(
                attention.o_proj,
                gates.repeat_interleave(self.groups * attention.head_dim),
                lambda: masked(ends[0], window),
                lambda: masked(ends[1], other),
            )

        return run

    def _mask(self, index: int, full: Tensor, window: int, hidden_states: Tensor) -> Tensor:
        """Additive mask [1, 1 or H, T, T] of a layer whose key/value heads `full` [KV] are unrestricted."""
        length, dtype = hidden_states.shape[1], hidden_states.dtype
        family = sliding_window(self.config, index)
        heads = tuple(full.tolist())
        key = (length, dtype, family, heads, window)
        if key not in self._masks:
            if sum(mask.nbytes for mask in self._masks.values()) > MASK_BYTES:
                self._masks.clear()
            self._masks[key] = self._new_mask(length, family, full, window, hidden_states)
        return self._masks[key]

    def _new_mask(self, length: int, family: int | None, full: Tensor, window: int, like: Tensor) -> Tensor:
        token = torch.arange(length, device=like.device)
        distance = token.unsqueeze(1) - token
        causal = distance >= 0
        if family is not None:
            causal &= distance < family
        near = causal & ((distance < window) | (token < self.sinks))
        if bool(full.any()):
            by_head = full.repeat_interleave(self.groups).to(like.device).view(1, -1, 1, 1)
            sees = torch.where(by_head, causal, near)
        else:
            sees = near.view(1, 1, length, length)
        return torch.zeros_like(sees, dtype=like.dtype).masked_fill(~sees, torch.finfo(like.dtype).min)


def blended(o_proj: nn.Module, gates: Tensor, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """The output of attention whose heads are first + gate * (second - first), blended before the output projection.

    Derivatives by the gates say what the second form of each key/value head would change.

    The input of the output projection is taken from the first run and replaced in the second.

    Args:
        gates: [H * D], a value per channel of the projection's input.
        first, second: run the family's attention in its two forms.
    """
    seen: list[Tensor] = []

    def take(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])

    def blend(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (seen[0] + gates.to(seen[0].dtype) * (inputs[0] - seen[0]),)

    handle = o_proj.register_forward_pre_hook(take)
    try:
        first()
    finally:
        handle.remove()
    handle = o_proj.register_forward_pre_hook(blend)
    try:
        return second()
    finally:
        handle.remove()
