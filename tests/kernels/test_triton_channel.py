"""The Triton kernels of the rule with a decay per channel against its recurrence in float64.

Without a GPU they run in Triton's interpreter: float32, a selection of the cases, small heads.
"""

from __future__ import annotations

import pytest
import torch

from deltanet_kernels import (
    chunk_channel_gated_delta_rule,
    fused_recurrent_channel_gated_delta_rule,
    naive_channel_gated_delta_rule,
)
from tests.kernels.cases import assert_as_good, assert_close, plainly_in, relative_error, results
from tests.kernels.channel_cases import CHANNEL_CASES, ChannelCase, channel_truth, make_channel_inputs
from tests.kernels.triton_mode import DEVICE, GPU, by_triton

INTERPRETED = {
    "T=1", "T=65", "gdn2", "one key head, 2 queries, 4 values", "packed, nothing but empty", "strong gates, gdn2",
    "g=-inf", "packed, no state", "K>V", "two products per chunk",
}  # fmt: skip
CHOSEN = [case for case in CHANNEL_CASES if GPU or case.name in INTERPRETED]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


triton_chunk = by_triton(chunk_channel_gated_delta_rule)
triton_recurrent = by_triton(fused_recurrent_channel_gated_delta_rule)


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_float32(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32, DEVICE)
    assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1e-5)


def test_half_precision() -> None:
    """The 16-bit paths of the kernels, which the interpreter computes rightly in float16 only."""
    inputs = make_channel_inputs(ChannelCase("half", T=70, g="strong", rule="gdn2"), torch.float16, DEVICE)
    assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1.5 * torch.finfo(torch.float16).eps)


RECURRENT = [
    ChannelCase("decode", T=1, B=3, H=2, HV=4, HQ=2, rule="gdn2"),
    ChannelCase("query heads share a state", T=4, H=1, HQ=4, HV=2, K=24, V=20),
    ChannelCase("packed", T=9, H=1, cu_seqlens=(0, 0, 1, 5, 8), rule="gla"),
    ChannelCase("closed gates, no norm, no state", T=5, H=1, g="reset", l2norm=False, scale=0.7, initial_state=False),
]


@pytest.mark.parametrize("case", RECURRENT, ids=str)
@torch.no_grad()
def test_recurrent(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32, DEVICE)
    with torch.enable_grad():
        wanted = channel_truth(inputs)
    o, state = triton_recurrent(**inputs)
    assert relative_error(o, wanted["o"]) < 1e-6
    assert relative_error(state, wanted["final_state"]) < 1e-6


def test_recurrent_calls_with_gradients_take_the_chunks() -> None:
    inputs = make_channel_inputs(ChannelCase("gradient", T=3), torch.float32, DEVICE)
    o, _ = triton_recurrent(**inputs)
    (gradient,) = torch.autograd.grad(o.sum(), inputs["g"])
    assert gradient.abs().sum() > 0


def test_recurrent_calls_are_refused_with_the_reason() -> None:
    with pytest.raises(NotImplementedError, match="float64"):
        triton_recurrent(**make_channel_inputs(ChannelCase("double", T=2), torch.float64, DEVICE))


# On the GPU only: low precision, every head size, bits.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHANNEL_CASES, ids=str)
def test_low_precision(case: ChannelCase, dtype: torch.dtype) -> None:
    inputs = make_channel_inputs(case, dtype, DEVICE)
    plain = plainly_in(dtype, inputs, naive_channel_gated_delta_rule)
    assert_as_good(results(triton_chunk, inputs), plain, channel_truth(inputs), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("HQ", [2, 4])
@pytest.mark.parametrize("rule", ["kda", "gdn2", "gla"])
def test_every_head_size_and_group(K: int, HQ: int, rule: str) -> None:
    for kind in ("random", "strong"):
        inputs = make_channel_inputs(ChannelCase("grouped", T=200, H=2, HQ=HQ, K=K, g=kind, rule=rule),
                                     torch.bfloat16, DEVICE)  # fmt: skip
        assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1.5 * torch.finfo(torch.bfloat16).eps)
