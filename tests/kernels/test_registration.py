"""Which calls of an operator skip PyTorch's dispatcher, and which do not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from deltanet_kernels.arguments import GatedNormCall
from deltanet_kernels.common.registration import Registered, cached
from deltanet_kernels.gated_delta_rule import chunk_forward
from deltanet_kernels.norm import norm_forward
from deltanet_kernels.prompt import inputs as prompt
from deltanet_kernels.prompt.calls import PromptInputsCall
from tests.kernels.triton_mode import DEVICE

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
WEIGHT = torch.ones(8, device=DEVICE)
CALL = GatedNormCall(X, None, WEIGHT)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The way that each call of `norm_forward` took."""
    taken: list[str] = []

    def note(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: (taken.append(name), call(*inputs))[1]

    monkeypatch.setattr(norm_forward, "op", note("op", norm_forward.op))
    monkeypatch.setattr(norm_forward, "function", note("function", norm_forward.function))
    return taken


class Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_plain_eager_calls_skip_the_dispatcher(ways: list[str]) -> None:
    with torch.no_grad():
        direct = norm_forward(CALL)
        parameter = norm_forward(CALL._replace(weight=torch.nn.Parameter(WEIGHT)))
    assert ways == ["function", "function"]
    assert torch.equal(direct, norm_forward.op(*CALL))
    assert torch.equal(direct, parameter)


@contextmanager
def grad() -> Iterator[torch.Tensor]:
    yield X.clone().requires_grad_()


@contextmanager
def meta() -> Iterator[torch.Tensor]:
    with torch.no_grad():
        yield X.to("meta")


@contextmanager
def fake() -> Iterator[torch.Tensor]:
    with torch.no_grad():
        yield FakeTensorMode(allow_non_fake_inputs=True).from_tensor(X)


@contextmanager
def mode() -> Iterator[torch.Tensor]:
    with torch.no_grad(), Record():
        yield X


@pytest.mark.parametrize("watched", [grad, meta, fake, mode], ids=lambda f: f.__name__)
def test_watched_calls_take_it(watched: Callable[..., Any], ways: list[str]) -> None:
    with watched() as x:
        y = norm_forward(CALL._replace(x=x, weight=WEIGHT.to(x.device)))
    assert ways == ["op"] if watched is not mode else ways[0] == "op"
    assert y.shape == X.shape
    assert y.requires_grad == (watched is grad)
    assert y.is_meta == (watched is meta)


def test_a_mode_sees_the_operator() -> None:
    with torch.no_grad(), Record() as record:
        norm_forward(CALL)
    assert "deltanet.norm_forward.default" in record.seen


@pytest.mark.filterwarnings("ignore:.*performance drop:UserWarning")
def test_transforms_take_it(ways: list[str]) -> None:
    """vmap's tensors call themselves plain; PyTorch unwraps them, row by row."""
    with torch.no_grad():
        rows = torch.func.vmap(lambda x: norm_forward(CALL._replace(x=x)))(X)
        assert ways[0] == "op"
        torch.testing.assert_close(rows, norm_forward(CALL))


def test_compiled_calls_take_it() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        compiled = torch.compile(lambda x: norm_forward(CALL._replace(x=x)), fullgraph=True, backend=backend)
        assert torch.equal(compiled(X), norm_forward(CALL))
    assert "deltanet.norm_forward.default" in [str(node.target) for node in graphs[0].graph.nodes]
    assert isinstance(norm_forward, Registered)


def test_cached_functions_take_symbolic_sizes_as_numbers() -> None:
    calls = []

    @cached
    def twice(number: int) -> int:
        calls.append(number)
        return 2 * number

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = mode.from_tensor(torch.empty(3, 8))
    assert isinstance(x.shape[0], torch.SymInt)
    assert [twice(x.shape[0]), twice(3), twice(x.shape[1])] == [6, 6, 16]
    assert calls == [3, 8]
    assert type(calls[0]) is int


def _chunk_call(final: bool) -> chunk_forward.ChunkForward:
    q, k, v = torch.randn(3, 1, 20, 2, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    g = torch.full((1, 20, 2), -0.5, device=DEVICE)
    return chunk_forward.ChunkForward(
        q, k, v, g, -g, None, None, None, None, 0.25, True, False, final, False, "auto", 1, "decayed"
    )


def _prompt_call(final: bool) -> PromptInputsCall:
    q = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weight = torch.ones(96, 4, device=DEVICE) if final else None
    return PromptInputsCall(q, q, q, 16, weight, qk_silu=True, output_tail=final)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize(
    ("plain", "registered", "make"),
    [
        (chunk_forward.chunk_without_gradients, chunk_forward.chunk_forward, _chunk_call),
        (prompt._operator, prompt.prompt_inputs_op, _prompt_call),
    ],
    ids=["chunk_forward", "prompt_inputs"],
)
def test_plain_calls_leave_out_empty_results(
    plain: Any, registered: Any, make: Callable[[bool], tuple[Any, ...]], final: bool
) -> None:
    with torch.no_grad():
        call = make(final)
        found, wanted = plain(call), registered.op(*call)
        with FakeTensorMode(allow_non_fake_inputs=True):
            traced = registered.op(*call)
    assert len(found) == len(wanted) == len(traced)
    for x, y, z in zip(found, wanted, traced, strict=True):
        assert (y.shape, y.dtype) == (z.shape, z.dtype)
        assert torch.equal(x, y) if x is not None else y.numel() == 0
    assert any(x is None for x in found)
