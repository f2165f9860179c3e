"""Start values of parts that a checkpoint has no tensors for.

transformers gives the modules inside the decoder to the decoder's own class, which does not know our parts; what it
does not initialise stays memory without a value. That concerns every buffer that is not saved, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.mixers.layer.parts import Part


@torch.no_grad()
def initialize(model: PreTrainedModel, others: Callable[[Any], None]) -> None:
    """Initialise what is not initialised: the parts of `model` here, everything else by `others`.

    Args:
        others: the `initialize_weights` of the family's class. It marks the modules it has seen.
    """
    parts = [part for part in model.modules() if isinstance(part, Part) and not _is_initialized(part)]
    others(model)
    for part in parts:
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        loaded = [(tensor, tensor.clone()) for tensor in tensors if _is_initialized(tensor)]
        if len(loaded) < len(tensors):
            part.reset_parameters()
            for tensor, value in loaded:
                tensor.copy_(value)


def _is_initialized(thing: Any) -> bool:
    return bool(getattr(thing, "_is_hf_initialized", False))  # transformers' mark of what it has loaded or initialised
