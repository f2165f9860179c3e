"""The inputs of a converted layer's operator and the outputs of the teacher's attention, on calibration text.

Shapes: n sequences, T tokens, H query heads, S states, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.mixers.layer import DeltaRule
from deltanet_hf.process_memory import give_back_freed_memory

from .share_fit import missed_scores

SEARCH_TOKENS = 1024  # number of tokens that `Samples.search_part` returns
KEPT_BYTES = 256 * 2**20  # memory for samples; those of further sequences are computed each time they are read


@dataclass(frozen=True)
class LayerCalibration:
    """The inputs of the teacher's attention on calibration text."""

    hidden_states: Tensor  # [n, T, hidden] float32, after the layer's input norm
    kwargs: dict[str, Any]  # the attention's other arguments, for a batch of one: position_embeddings, attention_mask


@dataclass(frozen=True)
class Sample:
    """One layer's inputs and the outputs that it is to reproduce, for a batch of sequences."""

    x: Tensor  # [n, T, hidden]
    q: Tensor  # [n, T, H, D], as the operator receives it, before its L2 norm
    k: Tensor  # [n, T, S, D]
    v: Tensor  # [n, T, S, D]
    heads: Tensor  # [n, T, H, D]: output of the teacher's attention before o_proj
    output: Tensor  # [n, T, hidden]: and after o_proj
    window_output: Tensor  # [n, T, H, D]: output of the layer's window; [n, 0] without one
    lse: Tensor  # [n, T, H]: its log-sum-exp
    missed: Tensor  # [n, T, H]: log of the mean exponential of the scores that it misses; nan where it misses none


NAMES = [field.name for field in fields(Sample)]


class Samples:
    """The samples of all calibration sequences, each of them a batch of one.

    Args:
        attention: the teacher's attention.
        layer: the converted layer with the teacher's weights. Its convolution is left out, as it is still an identity.
        x: attention inputs [n, T, hidden].
        kwargs: the attention's other arguments.
    """

    def __init__(self, attention: Any, layer: DeltaRule, x: Tensor, kwargs: dict[str, Any]) -> None:
        self.attention, self.layer, self.x, self.kwargs = attention, layer, x, kwargs
        self.kept = [self._sample(0)]
        size = sum(getattr(self.kept[0], name).nbytes for name in NAMES)
        self.kept += [self._sample(index) for index in range(1, min(len(x), KEPT_BYTES // size))]
        give_back_freed_memory(x.device)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Sample:
        return self.kept[index] if index < len(self.kept) else self._sample(index)

    def search_part(self) -> Sample:
        """The first sequences as one batch, about `SEARCH_TOKENS` tokens."""
        return self._batch(range(min(len(self), self._search_sequences())))

    def halves(self) -> tuple[Sample, Sample]:
        """Two disjoint batches of at most about `SEARCH_TOKENS` tokens; a single sequence is both."""
        count = min(len(self) // 2, self._search_sequences())
        first = self._batch(range(max(1, count)))
        return (first, self._batch(range(count, 2 * count))) if count else (first, first)

    def update_keys(self) -> None:
        """Computes the keys again, after the layer's offset has changed."""
        self.kept = [replace(sample, k=self._operator_inputs(*self._projected(sample.x))[1]) for sample in self.kept]

    def _search_sequences(self) -> int:
        return max(1, SEARCH_TOKENS // self.x.shape[1])

    def _batch(self, indices: range) -> Sample:
        parts = [self[index] for index in indices]
        return Sample(*(torch.cat([getattr(part, name) for part in parts]) for name in NAMES))

    @torch.no_grad()
    def _sample(self, index: int) -> Sample:
        x = self.x[index : index + 1]
        heads: list[Tensor] = []
        handle = self.attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
        try:
            output, _ = self.attention(hidden_states=x, **self.kwargs)
        finally:
            handle.remove()
        parts = self._projected(x)
        window_output = lse = missed = x.new_empty(1, 0)
        if self.layer.window_branch is not None:
            window_output, lse = self.layer.window_branch.attend(*parts, None)
            missed = missed_scores(self.layer.window_branch, *parts[:2])
        q, k, v = self._operator_inputs(*parts)
        return Sample(x, q, k, v, heads[0].view_as(q), output, window_output, lse, missed)

    @torch.no_grad()
    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as softmax attention sees them, with the heads of the layer's projections."""
        return self.layer.window_inputs(self.layer.project(x), self.kwargs.get("position_embeddings"))

    @torch.no_grad()
    def _operator_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        if layer.kv_repeats > 1:  # states that share projections
            k, v = (part.repeat_interleave(layer.kv_repeats, dim=2) for part in (k, v))
        return layer.activated(q, k, v)
