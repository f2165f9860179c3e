"""Prompts by CUDA graph.

A short prompt is padded behind its end to one of a few lengths, for each of which the prefill is captured once. No
token sees what follows it; what a prompt leaves (states, the ends of windows and convolutions, logits) is taken at its
own length, which the graph reads on the device. Parts of fixed lengths would need no length there, but what is left
of the prompt would take as many launches as all of it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from deltanet_hf.decoding.capture import CAPTURES, CapturedGraph
from deltanet_hf.fast import FastDecoder
from deltanet_hf.mixers.attention.single_query import UNMASKED, attending_by
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.key_values import as_cache_layer


class CapturedPrefill:
    """The captured prefill of so many sequences and tokens, with fixed addresses for everything that it uses.

    It runs once before that, which compiles and loads its kernels.

    Args:
        model: the model; it is not kept.
        form: its fast form.
        rows, tokens: of the prompt with its padding.
        memory: of another captured prompt, see `CapturedGraph`.
    """

    def __init__(self, model: Any, form: FastDecoder, rows: int, tokens: int, memory: Any) -> None:
        device = model.device
        with torch.inference_mode(False):  # such tensors may be changed in both modes
            self._ids = torch.zeros(rows, tokens, dtype=torch.long, device=device)
            self._length = torch.full((1,), tokens, dtype=torch.long, device=device)
        self._run(model, form)
        self._graph: CapturedGraph = CAPTURES[device.type](lambda: self._run(model, form), device, memory)
        self.memory = self._graph.memory

    def _run(self, model: Any, form: FastDecoder) -> Tensor:
        self._cache = DynamicCache(config=model.config)
        with attending_by(model.config, UNMASKED):
            output = form(
                model,
                input_ids=self._ids,
                use_cache=True,
                logits_to_keep=self._length - 1,
                prompt_length=self._length,
                return_dict=True,
                **{CACHE: self._cache},
            )
        return output.logits  # type: ignore[return-value]

    def read(self, ids: Tensor, cache: Cache) -> Tensor:
        """Read sequences without padding, ids [rows, T], into an empty cache: logits of the last tokens [rows, 1, V].

        The cache gets layers of its own.
        """
        self._ids[:, : ids.shape[1]].copy_(ids)  # what follows are tokens of earlier prompts
        self._length.fill_(ids.shape[1])
        self._graph.replay()
        cache.layers[:] = _layers_after(self._cache, ids.shape[1])
        return self._graph.output.clone()


class _Copies:
    """Copies of tensors, made by few launches."""

    def __init__(self) -> None:
        self._pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

    def of(self, x: Tensor) -> Tensor:
        """A contiguous tensor that is a copy of x, after `fill` at the latest."""
        if not x.is_contiguous():  # the first tokens alone
            return x.clone(memory_format=torch.contiguous_format)
        own, others = self._pairs[x.dtype]
        own.append(torch.empty_like(x))
        others.append(x)
        return own[-1]

    def fill(self) -> None:
        for own, others in self._pairs.values():
            torch._foreach_copy_(own, others)


def _layers_after(cache: Cache, tokens: int) -> list[Any]:
    """The layers of a cache that holds the first `tokens` tokens of a captured one."""
    copies = _Copies()
    layers = [as_cache_layer(layer).after(tokens, copies.of) for layer in cache.layers]
    copies.fill()
    return layers
