"""The Gluon kernel of the gradients within a chunk: its results on a Hopper GPU. What it serves: test_hopper_solve.py.

On other machines it is only compiled for Hopper.
"""

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton

from deltanet_kernels import naive_gated_delta_rule
from deltanet_kernels.gated_delta_rule import launch_plan
from deltanet_kernels.gated_delta_rule.chips import kernels
from deltanet_kernels.gated_delta_rule.hopper import launches
from tests.kernels.cases import Case, assert_integers_exact, make_inputs, plainly_in, relative_error, results, truth
from tests.kernels.hopper import EPS, WHOLE_CHUNKS, compile_for_hopper, needs_hopper
from tests.kernels.triton_mode import DEVICE, triton_chunk

CASES = [
    *WHOLE_CHUNKS,
    Case("value heads share a key head", T=128, B=2, H=2, HV=6),
    Case("raw gates, grouped", T=128, HV=2, raw=True),
    Case("open tokens between closed ones", T=128, g="tokens"),
    Case("beta=0, as they are", T=128, H=2, HV=4, beta="zero", l2norm=False),
    Case("keys as they are", T=128, H=2, l2norm=False),
    Case("scale", T=64, scale=-0.7),
    Case("no state", T=192, initial_state=False),
]


def test_compiles_for_hopper_without_a_gpu_and_is_imported_only_then() -> None:
    """Two programs must fit into the 228 KiB of a multiprocessor, of which each program costs one more."""
    constants = {"q_token": 4096, "k_token": 4096, "o_token": 4096, "v_token": 4096, "H": 32, "HV": 32, "NORM": True}
    forms = ((False, False), (True, False), (False, True))
    variants = [({**constants, "GATE": gate, "SIGMOID": gate, "GROUPS": groups}, 255) for gate, groups in forms]
    compiled = compile_for_hopper("gated_delta_rule.hopper.gradients_128", "gradients_128_kernel", variants)
    assert len(compiled) == len(variants)
    for one in compiled:
        assert "wgmma.mma_async" in one.ptx
        assert "cp.async.cg.shared.global" in one.ptx
        assert one.shared <= 113 * 1024


def test_other_tritons_keep_the_stock_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = (launches.solve_kernel.__wrapped__, "solve"), (launches.gradients_kernel.__wrapped__, "gradients_128")
    for find, module in finders:
        for version in ("3.5.1", "4.0.0"):
            with monkeypatch.context() as context:
                context.setattr(triton, "__version__", version)
                assert find() is None
        monkeypatch.setitem(sys.modules, f"deltanet_kernels.gated_delta_rule.hopper.{module}", None)
        assert find() is None


# On a Hopper GPU only.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The queries' shape of every launch of the Gluon kernel."""
    seen: list[torch.Size] = []
    gradients = launches.launch_gradients
    monkeypatch.setattr(launches, "launch_gradients", lambda q, *rest: (seen.append(q.shape), gradients(q, *rest))[1])
    return seen


def _stock_kernels(*key: Any) -> Any:
    return tuple(row for row in kernels(*key) if not row.gluon)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, launched: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors within the bounds of test_triton_chunk.test_low_precision, and no larger than the Triton kernels'."""
    inputs = make_inputs(replace(case, K=128), torch.bfloat16, DEVICE)
    wanted, plain = truth(inputs), plainly_in(torch.bfloat16, inputs)
    found = results(triton_chunk, inputs)
    assert len(launched) == 1
    monkeypatch.setattr(launch_plan, "kernels", _stock_kernels)
    stock = results(triton_chunk, inputs)
    assert len(launched) == 1
    for name, x in wanted.items():
        error = relative_error(found[name], x)
        assert error <= 1.3 * relative_error(stock[name], x) + 0.1 * EPS, name
        # A_log and dt_bias get one number per head, a sum over all tokens that cancels; only Triton's compares.
        if name not in ("dA_log", "ddt_bias"):
            assert error <= max(1.5 * EPS, 2 * relative_error(plain[name], x)), name


@pytest.mark.gpu
@needs_hopper
def test_gradients_of_strided_inputs(launched: list[torch.Size]) -> None:
    """q, k and v in one tensor, the gradient of o transposed, or one number expanded."""
    inputs = make_inputs(Case("strides", T=128, B=2, H=2, K=128), torch.bfloat16, DEVICE)
    leaves = [inputs[name] for name in ("q", "k", "v")]
    together = torch.cat([x.detach() for x in leaves], 2).split(2, 2)
    gates = [inputs[name].detach() for name in ("g", "beta")]
    do = torch.randn(2, 2, 128, 128, device="cuda").bfloat16().transpose(1, 2)
    for upstream in (do, torch.ones((), device="cuda", dtype=torch.bfloat16).expand(do.shape)):
        answers = []
        for given, gradient in ((together, upstream), (leaves, upstream.contiguous())):
            own = [x.detach().requires_grad_() for x in given]
            o, _ = triton_chunk(*own, *gates, use_qk_l2norm_in_kernel=True)
            answers.append(torch.autograd.grad(o, own, gradient))
        assert all(torch.equal(x, y) for x, y in zip(*answers, strict=True))
    # The expanded gradient has a unit stride nowhere and is copied first; all four calls came here.
    assert len(launched) == 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("HV", [2, 4])
@pytest.mark.parametrize("segments", [1, 3])
def test_integers_bit_for_bit(HV: int, segments: int, launched: list[torch.Size]) -> None:
    chunk = partial(triton_chunk, segments=segments)
    assert_integers_exact(chunk, naive_gated_delta_rule, torch.bfloat16, 128, HV=HV)
    assert launched


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("HV", [8, 16])
def test_thousand_runs_are_identical(HV: int, launched: list[torch.Size]) -> None:
    """More programs than the chip holds at a time."""
    inputs = make_inputs(Case("repeat", T=1280, B=2, H=8, HV=HV, K=128, raw=True), torch.bfloat16, DEVICE)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
    upstream = torch.randn(2, 1280, HV, 128, device=DEVICE).bfloat16()

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(triton_chunk(**inputs)[0], leaves, upstream)

    first = gradients()
    assert all(x.isfinite().all() for x in first)
    for _ in range(1000):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(), strict=True))
    assert len(launched) == 1001
