"""The public operators under torch.compile: choosing the Triton form breaks no graph.

Without a GPU, CPU tensors are sent to the Triton form, in Triton's interpreter.
"""

import pydoc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import deltanet_kernels
from deltanet_kernels.dispatch import Operator
from tests.kernels.triton_mode import DEVICE

HEADS = torch.randn(3, 1, 2, 1, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
GATES = torch.rand(2, 1, 2, 1, generator=torch.Generator().manual_seed(1)).to(DEVICE)
DELTA_RULE = (*HEADS, -GATES[0], GATES[1])
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "chunk_gated_delta_rule": lambda: DELTA_RULE,
    "fused_recurrent_gated_delta_rule": lambda: DELTA_RULE,
    "chunk_group_gated_delta_rule": lambda: DELTA_RULE,
    "chunk_channel_gated_delta_rule": lambda: (*HEADS, -HEADS[0].square(), GATES[1]),
    "chunk_mesa": lambda: (*DELTA_RULE, torch.ones(1, 16, device=DEVICE)),
    "causal_conv1d": lambda: (HEADS[0].flatten(2), HEADS[1, 0].flatten(1).mT.contiguous()),
    "gated_rms_norm": lambda: (HEADS[0], HEADS[1], HEADS[2, 0, 0, 0]),
    "gated_delta_step_": lambda: (
        *HEADS, *GATES, torch.zeros(1, 1, 16, 16, device=DEVICE), GATES[0, 0, 0], GATES[1, 0, 0]
    ),
    "window_attention": lambda: (*HEADS, 1, 1),
    "window_step_": lambda: (
        *HEADS[:, :, :1], 3, 1, *torch.zeros(2, 1, 1, 4, 16, device=DEVICE),
        torch.zeros(1, 4, dtype=torch.int32, device=DEVICE), torch.full((1,), 9, dtype=torch.int32, device=DEVICE),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_the_way_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
        return operator.triton()(call)

    monkeypatch.setattr(Operator, "unchecked", unchecked)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_graph_break_on_the_way_to_triton(name: str) -> None:
    function = getattr(deltanet_kernels, name)
    gradients = not name.endswith("step_")  # in place, without gradients
    answers = []
    for side in (torch.compile(function, backend="aot_eager", fullgraph=True), function):
        arguments = [x.clone() if isinstance(x, torch.Tensor) else x for x in ARGUMENTS[name]()]
        tensors = [x.requires_grad_(gradients) for x in arguments if isinstance(x, torch.Tensor)]
        found = side(*arguments)
        o = found[0] if isinstance(found, tuple) else found
        answers.append([o, *torch.autograd.grad(o.square().sum(), tensors)] if gradients else [o, *tensors])
    for x, y in zip(*answers, strict=True):
        assert torch.equal(x, y)


def test_sizes_that_change() -> None:
    """From the second call on, sizes are symbolic."""
    compiled = torch.compile(deltanet_kernels.chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    for length, size in ((2, 16), (3, 8), (5, 16), (7, 8)):
        arguments = [x.repeat_interleave(length, dim=1)[..., :size].clone().requires_grad_() for x in DELTA_RULE]
        torch.testing.assert_close(
            compiled(*arguments)[0], deltanet_kernels.chunk_gated_delta_rule(*arguments)[0], rtol=0, atol=0
        )


def test_help_shows_the_signature() -> None:
    shown = pydoc.plain(pydoc.render_doc(deltanet_kernels.silu_product))
    assert "silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor" in shown
    assert "silu(gate)" in shown
