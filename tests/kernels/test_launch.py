"""Launches that skip Triton's argument binder run the right code for the arguments, on the tensors' device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from deltanet_kernels.common import launch as module
from deltanet_kernels.common.launch import launch, specialization
from tests.kernels.cases import Case, make_inputs, results
from tests.kernels.triton_mode import DEVICE, triton_chunk

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _body(x, y, n, few, factor, SIZE: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0) * factor + OFFSET + few, mask=i < n)


KERNEL = triton.jit(do_not_specialize=["few"])(_body)
ALIGNED = torch.zeros(64)
ARGUMENTS = {
    "x": [ALIGNED, ALIGNED[1:], ALIGNED[4:], ALIGNED.half(), ALIGNED.bfloat16(), ALIGNED.long(), None],
    "n": [1, 2, 16, 17, 0, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**40, 2**63, True, False, 1.0],
    "few": [1, 2, 16, 2**31, 2**40, True],
    "factor": [1.0, 2.0, 16.0, 3, 16],
    "SIZE": [16, 32, True],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_equal_specialization_means_equal_code(name: str) -> None:
    """Wherever Triton would compile anew, the specialization differs."""
    kernel = JITFunction(_body, do_not_specialize=["few"])
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    seen: dict[Any, Any] = {}
    for value in ARGUMENTS[name]:
        given = {"x": ALIGNED, "y": ALIGNED, "n": 5, "few": 5, "factor": 0.5, "SIZE": 16, "OFFSET": 0, name: value}
        tritons = [str(part) for part in binder(**given)[1]]
        if name == "SIZE":
            tritons.append(str(value))
        ours = tuple(specialization(kernel, tuple(given.values()))[0])
        assert seen.setdefault(ours, tritons) == tritons, value
    assert len(seen) > 1


class _Compiled:
    """In place of a compiled kernel: what its launcher is given, and what its caller binds, go to `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.function, self.packed_metadata = "function", "metadata"

    def run(self, *given: Any) -> None:
        self.calls.append(given)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given: self.calls.append((grid, *given))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[_Compiled]:
    """The kernels that Triton compiles, each of which does nothing, on a device of number -1."""
    made: list[_Compiled] = []

    def compile_anew(self: Any, *_: Any, **__: Any) -> _Compiled:
        made.append(_Compiled())
        return made[-1]

    monkeypatch.setattr(JITFunction, "run", compile_anew)
    monkeypatch.setattr(module, "_current_device", lambda: -1)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 7)))
    return made


def test_the_launcher_gets_the_addresses_and_values_of_each_call(compiled: list[_Compiled]) -> None:
    kernel = JITFunction(_body)
    x = torch.zeros(80)
    for start, n in [(0, 21), (0, 32), (1, 21)]:  # compiled one by one: another integer, then another alignment
        launch(kernel, 3, x[start:], ALIGNED, n, 3, 0.5, SIZE=16, OFFSET=0)
        launch(kernel, 3, x[start:], ALIGNED, n, 3, 0.5, SIZE=16, OFFSET=0, num_warps=1)
    assert [len(one.calls) for one in compiled] == [0] * 6
    before = (7, "function", "metadata", None, None, None)
    for programs, start, n, variant in [(5, 16, 23, 0), (2, 4, 48, 2), (4, 5, 25, 4), (6, 0, 27, 0)]:
        launch(kernel, programs, x[start:], ALIGNED, n, 7, 1.5, SIZE=16, OFFSET=0)
        wanted = (programs, 1, 1, *before, x.data_ptr() + 4 * start, ALIGNED.data_ptr(), n, 7, 1.5, 16, 0)
        assert compiled[variant].calls[-1] == wanted
    assert [len(one.calls) for one in compiled] == [2, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_the_tensors(compiled: list[_Compiled], name: str) -> None:
    kernel, hooks = JITFunction(_body), getattr(triton.knobs.runtime, name)
    given = (ALIGNED, ALIGNED, 5, 3, 0.5)
    launch(kernel, 2, *given, SIZE=16, OFFSET=0)
    hooks.add(print)
    try:
        launch(kernel, 2, *given, SIZE=16, OFFSET=0)
    finally:
        hooks.remove(print)
    ((grid, x, *others),) = compiled[0].calls
    assert grid == (2, 1, 1)
    assert x is ALIGNED
    assert others[1:] == [5, 3, 0.5, 16, 0]


def _run(x: torch.Tensor, n: int, few: int, factor: float, OFFSET: int) -> torch.Tensor:
    y = torch.zeros_like(x)
    launch(KERNEL, triton.cdiv(x.numel(), 16), x, y, n, few, factor, SIZE=16, OFFSET=OFFSET)
    return y


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_are_of_this_call(dtype: torch.dtype, first: int) -> None:
    x = torch.randn(200, device=DEVICE).to(dtype)[first:]
    for n, few, factor, OFFSET in 2 * [(100, 3, 2.0, 1), (16, 3, 2.0, 1), (1, 1, 0.5, 1), (100, 7, 0.5, 0)]:
        wanted = torch.where(torch.arange(len(x), device=DEVICE) < n, x * factor + OFFSET + few, 0.0)
        torch.testing.assert_close(_run(x, n, few, factor, OFFSET), wanted.to(dtype), rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_a_launch_seen_before_passes_the_binder_by(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(64.0, device=DEVICE)
    wanted = _run(x, 48, 5, 2.5, 3)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("bound again")

    monkeypatch.setattr(JITFunction, "run", refuse)
    assert torch.equal(_run(x, 48, 5, 2.5, 3), wanted)
    assert _run(x * 2, 32, 6, 1.5, 3)[31] == x[31] * 3 + 9  # the same code, other values
    with pytest.raises(AssertionError, match="bound again"):
        _run(x, 48, 5, 2.5, 4)


@pytest.mark.gpu
def test_lengths_share_their_code() -> None:
    x = torch.randn(64, device=DEVICE)
    _run(x, 33, 5, 2.0, 0)
    before = len(module._variants)
    for n in range(35, 63, 2):
        _run(x, n, n, n / 2, 0)
    assert len(module._variants) == before


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("K", [40, 64, 128])
def test_operators_give_the_same_bits_on_every_device(K: int) -> None:
    case = Case("whole chunks", T=128, H=2, K=K, raw=True)
    first, second = (
        results(triton_chunk, make_inputs(case, torch.bfloat16, device)) for device in ("cuda:0", "cuda:1")
    )
    for name, x in first.items():
        assert torch.equal(x.cpu(), second[name].cpu()), name
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@needs_two_gpus
def test_tensors_on_another_device_than_the_current_one() -> None:
    x = torch.randn(64, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        assert torch.equal(_run(x, 64, 1, 2.0, 0), x * 2 + 1)
    assert torch.cuda.current_device() == 0
