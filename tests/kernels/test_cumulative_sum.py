"""Cumulative sums over tokens, which torch.compile leaves to the operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltanet_kernels import cumulative_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_pytorch(dtype: torch.dtype) -> None:
    for shape in ((2, 7, 3), (1, 1, 2), (2, 0, 3), (0, 5, 2), (2, 300), (1, 130, 2, 5)):
        x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        assert torch.equal(cumulative_sum(x), x.cumsum(1)), shape
        assert torch.equal(cumulative_sum(x.transpose(0, 1).contiguous().transpose(0, 1)), x.cumsum(1)), shape


def test_gradient() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(cumulative_sum, x)
    torch.library.opcheck(torch.ops.deltanet.token_sums.default, (x,))


def test_torch_compile_sees_one_operator() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2), requires_grad=True)
    compiled = torch.compile(lambda x: cumulative_sum(2 * x).square().sum(), backend=backend, fullgraph=True)
    (want,) = torch.autograd.grad((2 * x).cumsum(1).square().sum(), x)
    (got,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(got, want)
    assert "deltanet.token_sums.default" in seen
    assert not any("cumsum" in name for name in seen)


@pytest.mark.gpu
def test_compiled_on_a_gpu() -> None:
    x = torch.randn(8, 512, 9, device="cuda")
    torch.testing.assert_close(torch.compile(lambda x: cumulative_sum(2 * x) + 1)(x), (2 * x).cumsum(1) + 1)
