"""One model's decoding step on one cache as a graph, for loops other than `generate`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.decoding.captured_step import CapturedStep, NotCapturable, capacity_for, layout
from deltanet_hf.fast import fast_form
from deltanet_hf.mixers.cache.key_values import as_cache_layer


@torch.no_grad()
def graphed_step(model: PreTrainedModel, cache: Cache, tokens: int) -> Callable[[Tensor], Tensor]:
    """Capture the step of a model, converted or not, on a cache that holds prompts without padding.

    The step runs once before that, which compiles and loads its kernels, and is taken back.

    Args:
        tokens: the largest number of further tokens.

    Returns:
        A function of tokens [B, 1] int64 that reads them into the cache and returns logits [B, 1, vocabulary], which
        its next call overwrites. It raises ValueError where there is no place for a token.

    Raises:
        NotCapturable: the step cannot be captured on this cache or device.
    """
    if model.device.type not in CAPTURES:
        raise NotCapturable(f"the model is on {model.device.type}")
    seen = int(cache.get_seq_length())
    layout(cache, model.config)
    rows = as_cache_layer(cache.layers[0]).batch_size
    with torch.inference_mode(False):  # such tensors may be changed in both modes
        ids, positions = (torch.full((rows, 1), start, device=model.device) for start in (0, seen))
        inputs = {"input_ids": ids, "position_ids": positions}
        form = fast_form(model)
        if isinstance(form, str):
            raise NotCapturable(form)
        step = CapturedStep(model, cache, inputs, capacity_for(seen + tokens, seen + tokens), None, form)
    step.set_inputs(inputs)
    step.buffers.load(cache, seen, None)
    with step.buffers.taken_back(cache):
        step.run(model, cache)
    step.capture(model, cache)

    def read(token: Tensor) -> Tensor:
        if step.buffers.full:
            raise ValueError(f"graphed_step: got more than {tokens} tokens, for which the cache has no places")
        step.set_inputs({"input_ids": token, "position_ids": positions})
        positions.add_(1)
        step.buffers.advance()
        return step.replay()

    return read
