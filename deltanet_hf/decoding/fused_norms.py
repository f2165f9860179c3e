"""The RMSNorms of a family's model as one kernel each, together with the residual sums that were put off.

A family's norm is eight small operations (casts, square, mean, root, products). Norms with hooks or with sharded
weights keep their own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deltanet_hf.decoding.deferred_sum import DeferredSum
from deltanet_kernels import rms_norm
from deltanet_kernels.arguments import RMSNormCall


class Form(NamedTuple):
    """How a class of norms rounds and multiplies; see `deltanet_kernels.rms_norm`."""

    offset: float
    round_first: bool


LLAMA, OLMO, GEMMA = Form(0.0, True), Form(0.0, False), Form(1.0, False)
FORMS = {
    "LlamaRMSNorm": LLAMA,
    "MistralRMSNorm": LLAMA,
    "Qwen2RMSNorm": LLAMA,
    "Qwen3RMSNorm": LLAMA,
    "GraniteRMSNorm": LLAMA,
    "SmolLM3RMSNorm": LLAMA,
    "Phi3RMSNorm": LLAMA,
    "Qwen3MoeRMSNorm": LLAMA,
    "OlmoeRMSNorm": LLAMA,
    "MixtralRMSNorm": LLAMA,
    "GraniteMoeRMSNorm": LLAMA,
    "Olmo2RMSNorm": OLMO,
    "Olmo3RMSNorm": OLMO,
    "Gemma2RMSNorm": GEMMA,
    "Gemma3RMSNorm": GEMMA,
    "Qwen3_5RMSNorm": GEMMA,
}
"""By the name of the class in transformers; one that is missing is computed by its own forward."""


def form_of(norm: nn.Module) -> Form | None:
    """The form of a norm that can be computed here; None for any other module."""
    kind, held = type(norm), norm.__dict__
    form = FORMS.get(kind.__name__)
    if form is None or not kind.__module__.startswith("transformers.models."):
        return None
    if held["_forward_hooks"] or held["_forward_pre_hooks"]:
        return None
    return form if type(held["_parameters"]["weight"]) is nn.Parameter else None


def norm_forward(norm: nn.Module, sums: DeferredSum | None) -> Callable[[Tensor], Tensor] | None:
    """The forward of a norm by one kernel, with the sum before it if `sums` put it off; None for any other module."""
    form = form_of(norm)
    if form is None:
        return None
    held, (offset, round_first) = norm.__dict__, form  # quicker than the attributes of a module
    weight: Tensor = held["_parameters"]["weight"]
    eps = float(held["variance_epsilon"] if "variance_epsilon" in held else held["eps"])
    size, device = weight.shape[-1], weight.get_device()

    def forward(x: Tensor) -> Tensor:
        added = None if sums is None else sums.take(x)
        fits = type(x) is Tensor and x.shape[-1] == size and x.get_device() == device
        if torch.is_grad_enabled() or not fits or (round_first and x.dtype != weight.dtype):
            if added is not None:
                added.write()
            y: Tensor = type(norm).forward(norm, x)
        elif added is None:
            y = rms_norm.unchecked(RMSNormCall(x, weight, eps, offset, round_first))
        else:
            call = RMSNormCall(added.x, weight, eps, offset, round_first, added.residual, added.total)
            y = rms_norm.unchecked(call)
        return y

    return forward
