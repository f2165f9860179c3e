"""Where the Triton kernels run in the tests: on the GPU if there is one, else on the CPU in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("triton was imported before TRITON_INTERPRET could be set", allow_module_level=True)


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
