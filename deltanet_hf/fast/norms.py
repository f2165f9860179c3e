"""The RMSNorms of the families as one kernel each, together with the residual sum before them.

A family's norm is eight small operations (casts, square, mean, root, products). The kernel has the same roundings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from deltanet_kernels import rms_norm
from deltanet_kernels.arguments import RMSNormCall


class Sum(NamedTuple):
    """x + residual, tensors of one shape: the output of a decoder layer, which the norm after it computes."""

    x: Tensor
    residual: Tensor

    def total(self) -> Tensor:
        return self.residual + self.x


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
    "GptOssRMSNorm": OLMO,
    "Olmo2RMSNorm": OLMO,
    "Olmo3RMSNorm": OLMO,
    "Gemma2RMSNorm": GEMMA,
    "Gemma3RMSNorm": GEMMA,
    "Qwen3_5RMSNorm": GEMMA,
}
"""By the name of the class in transformers."""


def form_of(norm: nn.Module) -> Form | None:
    """The form of a norm that `FastNorm` computes; None for any other module."""
    kind = type(norm)
    return FORMS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


class FastNorm:
    """A norm of a known form by one kernel, without gradients."""

    def __init__(self, norm: Any) -> None:
        form = form_of(norm)
        assert form is not None
        self._norm, self._weight, (self._offset, self._round_first) = norm, norm.weight, form
        self._eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)

    def __call__(self, x: Tensor | Sum) -> Tensor:
        """x [..., D] -> [..., D]; of a residual sum too."""
        return self.with_sum(x)[0]

    def with_sum(self, x: Tensor | Sum) -> tuple[Tensor, Tensor]:
        """The normalised x, and x itself, which is the sum where a residual sum is given."""
        x, residual = x if isinstance(x, Sum) else (x, None)
        if self._round_first and x.dtype != self._weight.dtype:  # the product has the wider dtype
            x = x if residual is None else residual + x
            return self._norm(x), x
        if residual is None:
            call = RMSNormCall(x, self._weight, self._eps, self._offset, self._round_first)
            return rms_norm.unchecked(call), x
        total = residual.new_empty(residual.shape)
        call = RMSNormCall(x.contiguous(), self._weight, self._eps, self._offset, self._round_first, residual, total)
        return rms_norm.unchecked(call), total
