"""Where the Triton kernels run in the tests: on the GPU if there is one, else on the CPU in Triton's interpreter."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deltanet_kernels
from deltanet_kernels.dispatch import Operator

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton was imported before TRITON_INTERPRET could be set", allow_module_level=True)


def by_triton(operator: Operator[..., Any, Any]) -> Callable[..., Any]:
    """The operator by its Triton form on any device, without checks."""
    return lambda *args, **kwargs: operator.triton()(operator.call(*args, **kwargs))


def by_pytorch(operator: Operator[..., Any, Any]) -> Callable[..., Any]:
    """The operator by its PyTorch form on any device, without checks."""
    return lambda *args, **kwargs: operator.cpu(operator.call(*args, **kwargs))


triton_conv = by_triton(deltanet_kernels.causal_conv1d)
triton_norm = by_triton(deltanet_kernels.gated_rms_norm)
triton_rms_norm = by_triton(deltanet_kernels.rms_norm)
triton_product = by_triton(deltanet_kernels.silu_product)
triton_gates = by_triton(deltanet_kernels.gate_values)
triton_keep = by_triton(deltanet_kernels.window_keep)
triton_decode_attention = by_triton(deltanet_kernels.decode_attention)


def triton_chunk(*args: Any, segments: int | None = None, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`chunk_gated_delta_rule` by the Triton kernels on any device, cut into `segments`."""
    from deltanet_kernels.arguments import RuleCall
    from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton

    return chunk_gated_delta_rule_triton(RuleCall(*args, **kwargs), segments)


def triton_recurrent(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_recurrent_gated_delta_rule` by the Triton kernels on any device."""
    from deltanet_kernels.arguments import RuleCall
    from deltanet_kernels.gated_delta_rule.recurrent import fused_recurrent_gated_delta_rule_triton

    return fused_recurrent_gated_delta_rule_triton(RuleCall(*args, **kwargs))
