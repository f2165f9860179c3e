"""The forward of a model as torch.compile makes it, which the model itself does not come to hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

VARIANTS = 64  # of one function; after 8 of them, PyTorch's own limit, it would silently run uncompiled


def compiled_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's forward, as a function of the model and its inputs, compiled by Inductor for the exact shapes of each
    call, without gradients.

    Its own CUDA graphs are off (the default mode of torch.compile), so that the caller can record it. Called in
    inference mode it leaves that mode: then compiled code may write to any tensor of a cache.
    """
    compiled = torch.compile(model.forward, dynamic=False)

    def forward(_: PreTrainedModel, **inputs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), torch._dynamo.config.patch(recompile_limit=VARIANTS):
            return compiled(**inputs)

    return forward
