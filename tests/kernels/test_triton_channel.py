"""The Triton kernels of the rule with a decay per channel against its recurrence in float64.

Without a GPU they run in Triton's interpreter: float32, a selection of the cases, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_kernels import naive_channel_gated_delta_rule
from tests.kernels.cases import assert_as_good, assert_close, assert_repeats, plainly_in, relative_error, results
from tests.kernels.channel_cases import CHANNEL_CASES, ChannelCase, channel_truth, make_channel_inputs
from tests.kernels.triton_mode import DEVICE, GPU

INTERPRETED = {
    "T=1", "T=65", "gdn2", "one key head, 2 queries, 4 values", "packed, nothing but empty", "strong gates, gdn2",
    "g=-inf", "packed, no state", "K>V", "two products per chunk",
}  # fmt: skip
CHOSEN = [case for case in CHANNEL_CASES if GPU or case.name in INTERPRETED]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def triton_chunk(**inputs: Any) -> Any:
    from deltanet_kernels.channel_gates.calls import ChannelCall
    from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton

    return chunk_channel_gated_delta_rule_triton(ChannelCall(**inputs))


def triton_recurrent(**inputs: Any) -> Any:
    from deltanet_kernels.channel_gates.calls import ChannelCall
    from deltanet_kernels.channel_gates.recurrent import fused_recurrent_channel_gated_delta_rule_triton

    return fused_recurrent_channel_gated_delta_rule_triton(ChannelCall(**inputs))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_float32(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32, DEVICE)
    assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1e-5)


def test_half_precision() -> None:
    """The 16-bit paths of the kernels, which the interpreter computes rightly in float16 only."""
    inputs = make_channel_inputs(ChannelCase("half", T=70, g="strong", rule="gdn2"), torch.float16, DEVICE)
    assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1.5 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("output", ["o", "final_state"])
def test_gradient_of_one_output(output: str) -> None:
    inputs = make_channel_inputs(ChannelCase("one output", T=20, HQ=2), torch.float32, DEVICE)
    found, wanted = (
        results(function, inputs, (output,)) for function in (triton_chunk, naive_channel_gated_delta_rule)
    )
    assert_close(found, wanted, 1e-5)


def test_strides_of_every_kind() -> None:
    """q, k, v as slices of one tensor, expanded gates, a gradient with zero strides."""
    torch.manual_seed(0)
    joined = torch.randn(1, 20, 96, device=DEVICE)
    q, k, v = (x.unflatten(-1, (2, 16)) for x in joined.split(32, dim=-1))
    g, beta = -torch.rand(1, 20, 2, 1, device=DEVICE).expand(1, 20, 2, 16), torch.rand(1, 1, 2, device=DEVICE)
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for function, into in ((triton_chunk, found), (naive_channel_gated_delta_rule, wanted)):
        leaves = {"q": q, "k": k, "v": v, "g": g, "beta": beta.expand(1, 20, 2), "erase_key": k / 4}
        leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        o, _ = function(**leaves)
        into += [o, *torch.autograd.grad(o.sum(), list(leaves.values()))]
    for x, y in zip(found, wanted, strict=True):
        assert relative_error(x, y) < 1e-5


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


def test_refused_calls_name_the_reason() -> None:
    x = torch.randn(1, 2, 1, 160, device=DEVICE)
    beta = torch.rand(1, 2, 1, device=DEVICE)
    with pytest.raises(NotImplementedError, match="head sizes 160 and 160"):
        triton_chunk(q=x, k=x, v=x, g=-x.abs(), beta=beta)
    x = x[..., :16].double()
    with pytest.raises(NotImplementedError, match="float64"):
        triton_recurrent(q=x, k=x, v=x, g=-x.abs(), beta=beta)


def test_registered_operator_is_sound() -> None:
    """Schema, fake implementation and gradient registration agree with what the operator does."""
    import deltanet_kernels.channel_gates.chunk  # noqa: F401 (registers it)

    inputs = make_channel_inputs(ChannelCase("opcheck", T=9, HQ=2, rule="gdn2"), torch.float32, DEVICE)
    names = ("q", "k", "v", "g", "beta", "erase_key", "initial_state")
    arguments = [inputs[name].detach() for name in names]
    torch.library.opcheck(
        torch.ops.deltanet.channel_chunk_forward.default,
        (*arguments, None, 1.0, True, True, True, "ieee"),
        test_utils=("test_schema", "test_faketensor"),
    )


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


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
def test_hundred_runs_are_identical(K: int) -> None:
    inputs = make_channel_inputs(ChannelCase("repeat", T=300, B=2, H=2, K=K, rule="gdn2"), torch.bfloat16, DEVICE)
    assert_repeats(lambda: results(triton_chunk, inputs), 100)
