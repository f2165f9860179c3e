"""The Triton kernels of the rule with a decay per channel against its recurrence in float64.

Without a GPU they run in Triton's interpreter: float32, a selection of the cases, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.cases import assert_close, results
from tests.kernels.channel_cases import CHANNEL_CASES, ChannelCase, channel_truth, make_channel_inputs
from tests.kernels.triton_mode import DEVICE, GPU

INTERPRETED = {
    "T=1", "T=65", "gdn2", "one key head, 2 queries, 4 values", "packed, nothing but empty", "strong gates, gdn2",
    "g=-inf", "packed, no state", "K>V",
}  # fmt: skip
CHOSEN = [case for case in CHANNEL_CASES if GPU or case.name in INTERPRETED]
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def triton_chunk(**inputs: Any) -> Any:
    from deltanet_kernels.channel_gates.arguments import ChannelCall
    from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton

    return chunk_channel_gated_delta_rule_triton(ChannelCall(**inputs))


def triton_recurrent(**inputs: Any) -> Any:
    from deltanet_kernels.channel_gates.arguments import ChannelCall
    from deltanet_kernels.channel_gates.recurrent import fused_recurrent_channel_gated_delta_rule_triton

    return fused_recurrent_channel_gated_delta_rule_triton(ChannelCall(**inputs))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_float32(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32, DEVICE)
    assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1e-5)
