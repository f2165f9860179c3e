"""The operators of inner training on a CUDA device: against float64, and captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deltanet_kernels import InnerNorm, chunk_mesa, chunk_titans, chunk_ttt, naive_mesa, naive_titans, naive_ttt
from tests.kernels.state_cases import Shape, assert_same, draw, inputs, mesa_arguments, results, single

pytestmark = pytest.mark.gpu
SHAPE = Shape("", T=200, B=2, H=3, HQ=3, HV=3, K=64, V=64)
PACKED = Shape("", T=200, H=3, HQ=3, HV=3, K=64, V=64, cu_seqlens=(0, 1, 90, 90, 190))


def case(name: str, shape: Shape) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """Chunk form, recurrence and arguments on the CPU in float64."""
    normal = draw(1)
    given = inputs(shape)
    beta = normal(shape.B, shape.T, shape.HV).sigmoid()
    if name == "mesa":
        return chunk_mesa, naive_mesa, mesa_arguments(shape, state=False)
    if name == "titans":
        return chunk_titans, naive_titans, given | {"theta": beta, "log_mu": F.logsigmoid(normal(*beta.shape))}
    given |= {"eta": beta / 16, "mini_batch": 16}
    if name == "ttt, layer norm":
        first = 8 * torch.eye(65, 64, dtype=torch.float64).repeat(shape.HV, 1, 1)
        given["norm"] = InnerNorm(1 + 0.1 * normal(shape.HV, 64), normal(shape.HV, 64), first)
    return chunk_ttt, naive_ttt, given


def on_gpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)(*(on_gpu(x) for x in value))
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("shape", [SHAPE, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ["mesa", "ttt", "ttt, layer norm", "titans"])
def test_float32_on_the_device(name: str, shape: Shape) -> None:
    chunk, naive, given = case(name, shape)
    found = results(chunk, {key: on_gpu(x) for key, x in single(given).items()})
    ours, theirs = (tuple([x.double().cpu() for x in part] for part in both) for both in (found, results(naive, given)))
    assert_same(ours, theirs, 1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mesa", "ttt", "ttt, layer norm", "titans"])
def test_a_cuda_graph_records_forward_and_backward(name: str) -> None:
    chunk, _, given = case(name, SHAPE)
    arguments = {key: on_gpu(x) for key, x in single(given).items()} | {"output_final_state": False}
    leaves = [arguments[key].requires_grad_() for key in ("q", "k", "v", "g")]

    def run() -> list[torch.Tensor]:
        o, _ = chunk(**arguments)
        return [o, *torch.autograd.grad(o.square().sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
