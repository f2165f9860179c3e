"""The Gluon kernel of scores and inverse, and its results on a Hopper GPU; which calls it and that of gradients serve.

On other machines it is only compiled for Hopper.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from deltanet_kernels import naive_gated_delta_rule
from deltanet_kernels.common.sequences import cut_chunks
from deltanet_kernels.gated_delta_rule import launch_plan
from deltanet_kernels.gated_delta_rule.chips import GRADIENTS, HOPPER_GRADIENTS, HOPPER_SOLVE, SCORES
from deltanet_kernels.gated_delta_rule.hopper import launches
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs
from deltanet_kernels.gated_delta_rule.scores import scores
from deltanet_kernels.gated_delta_rule.solve import invert
from tests.kernels.cases import Case, assert_integers_exact, make_inputs, plainly_in, relative_error, results, truth
from tests.kernels.hopper import EPS, WHOLE_CHUNKS, compile_for_hopper, needs_hopper
from tests.kernels.triton_mode import DEVICE, triton_chunk

CASES = [
    *WHOLE_CHUNKS,
    Case("two value heads share a key head", T=128, B=2, H=2, HV=4),
    Case("four value heads share a key head", T=128, HV=4),
    Case("raw gates, three value heads share a key head", T=128, HV=3, raw=True),
    Case("open tokens between closed ones", T=128, HV=2, g="tokens"),
    Case("beta=2 on nearly equal keys", T=128, HV=2, beta="two", keys="equal"),
    Case("beta=2 on nearly equal keys, no decay", T=128, beta="two", keys="equal", g="zero"),
    Case("keys as they are", T=128, H=2, HV=4, l2norm=False),
    Case("scale", T=64, scale=-0.7, initial_state=False),
]


def test_compiles_for_hopper_without_a_gpu_and_is_imported_only_then() -> None:
    """Four programs must fit on a multiprocessor, three where value heads share the products."""
    variants = []
    for K, share, norm, with_scores in (
        (128, 1, True, True), (128, 2, False, True), (64, 1, False, True), (64, 3, True, True), (128, 1, True, False),
    ):  # fmt: skip
        constants = {"q_token": 8 * K, "k_token": 8 * K, "H": 8, "HV": 8 * share, "K": K}
        constants |= {"NORM": norm, "GATE": not norm, "SIGMOID": not norm, "BOUND": norm, "SCORES": with_scores}
        variants.append((constants, launches.SHARED_KEY_SOLVE_REGISTERS if share > 1 else launches.SOLVE_REGISTERS))
    compiled = compile_for_hopper("gated_delta_rule.hopper.solve", "scores_and_inverse_kernel", variants)
    for (constants, registers), one in zip(variants, compiled, strict=True):
        for instruction in ("wgmma.mma_async", "mma.sync.aligned.m16n8k8", "tf32", "cp.async.cg.shared.global"):
            assert instruction in one.ptx, (constants, instruction)
        programs = min(65536 // (128 * registers), 228 * 1024 // (one.shared + 1024))
        assert programs == (4 if constants["H"] == constants["HV"] else 3), constants


SERVED: list[tuple[tuple[int, int, int], int, int, torch.dtype, tuple[int, int], bool, bool]] = [
    ((2, 2, 2), 128, 128, torch.bfloat16, (9, 0), True, True),
    ((2, 2, 6), 128, 128, torch.bfloat16, (9, 0), True, True),
    ((2, 2, 8), 128, 64, torch.bfloat16, (9, 0), True, False),
    ((2, 2, 2), 64, 64, torch.bfloat16, (9, 0), True, False),
    ((2, 2, 2), 64, 256, torch.bfloat16, (9, 0), True, False),
    ((4, 2, 2), 128, 128, torch.bfloat16, (9, 0), False, False),
    ((2, 2, 2), 32, 64, torch.bfloat16, (9, 0), False, False),
    ((2, 2, 2), 100, 128, torch.bfloat16, (9, 0), False, False),
    ((2, 2, 2), 256, 128, torch.bfloat16, (9, 0), False, False),
    ((2, 2, 2), 128, 128, torch.float16, (9, 0), False, False),
    ((2, 2, 2), 64, 64, torch.float32, (9, 0), False, False),
    ((2, 2, 2), 128, 128, torch.bfloat16, (8, 0), False, False),
    ((2, 2, 2), 128, 128, torch.bfloat16, (10, 0), False, False),
    ((2, 2, 2), 128, 128, torch.bfloat16, (0, 0), False, False),
]


def test_both_kernels_serve_some_heads_in_bfloat16_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of 64 and 128; the gradients, heads of 128 alone."""
    for name in ("solve_kernel", "gradients_kernel"):
        monkeypatch.setattr(launches, name, lambda: "a kernel")
    for row in SERVED:
        heads, K, V, dtype, capability, *wanted = row
        q, k = (torch.zeros(1, 64, n, K, dtype=dtype) for n in heads[:2])
        v, do = (torch.zeros(1, 64, n, V, dtype=dtype) for n in (heads[2], max(heads)))
        monkeypatch.setattr(launch_plan, "capability", lambda device, capability=capability: capability)
        plan = launch_plan.launch_plan(q, k, v, None, "tf32", "decayed")
        stages = (SCORES, HOPPER_SOLVE, (q, k)), (GRADIENTS, HOPPER_GRADIENTS, (q, k, do))
        for (stage, kernel, copied), served in zip(stages, wanted, strict=True):
            assert (plan.serving(stage, *copied) is kernel) is served, row
            for change in ({"full": False}, {"precision": "ieee"}, {"default": False}):
                assert plan._replace(**change).serving(stage, *copied) is not kernel, (row, change)


def test_leaves_addresses_that_16_bytes_do_not_divide_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "solve_kernel", lambda: "a kernel")
    q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(launch_plan, "capability", lambda device: (9, 0))
    plan = launch_plan.launch_plan(q, q, q, None, "tf32", "decayed")

    def served(q: torch.Tensor, k: torch.Tensor) -> bool:
        return plan.serving(SCORES, q, k) is HOPPER_SOLVE

    wide = torch.zeros(1, 64, 2, 68, dtype=torch.bfloat16)
    shifted = torch.zeros(q.numel() + 8, dtype=torch.bfloat16)
    for odd in (wide[..., :64], shifted[4:-4].view(q.shape)):
        assert not served(odd, q)
        assert not served(q, odd)
    packed = torch.zeros(1, 64, 6, 64, dtype=torch.bfloat16)
    assert served(packed[:, :, :2], packed[:, :, 2:4])
    assert served(q[:, :1].expand(-1, 64, -1, -1), q)


# On a Hopper GPU only.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The keys' shape of every launch of the Gluon kernel."""
    seen: list[torch.Size] = []
    solve = launches.launch_solve
    monkeypatch.setattr(launches, "launch_solve", lambda inputs: (seen.append(inputs.k.shape), solve(inputs))[1])
    return seen


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_results(case: Case, K: int, V: int, launched: list[torch.Size]) -> None:
    case = replace(case, K=K, V=V)
    _assert_close([make_inputs(case, torch.bfloat16, DEVICE, seed) for seed in range(4)], triton_chunk)
    assert len(launched) == 4


def _assert_close(draws: list[dict[str, Any]], function: Callable[..., Any]) -> None:
    """Errors at most twice those of the recurrence in bfloat16, or a few roundings (eps/2 each).

    The geometric mean over the draws: where reflections amplify roundings, or gradients cancel, single ones are luck.
    """
    logarithms = []
    for inputs in draws:
        wanted = truth(inputs)
        pairs = results(function, inputs), plainly_in(torch.bfloat16, inputs)
        logarithms.append([[relative_error(x[name], wanted[name]) for name in wanted] for x in pairs])
    found, plain = torch.tensor(logarithms).clamp(min=1e-9).log().mean(0).exp()
    for name, error, bound in zip(wanted, found, (2 * plain).clamp(min=1.5 * EPS), strict=True):
        assert error <= bound, name


@dataclass
class Before:
    """The tensors that the state kernel reads."""

    P: torch.Tensor
    T: torch.Tensor
    sums: torch.Tensor  # G, s: [2, HV, tokens]
    of_state: torch.Tensor  # [HV, tokens, 4]
    of_output: torch.Tensor  # [HV, tokens, 2]
    bounds: torch.Tensor

    def __init__(self, P: torch.Tensor, T: torch.Tensor, factors: torch.Tensor, bounds: torch.Tensor) -> None:
        HV, tokens = P.shape[1], factors.shape[1]
        self.P, self.T, self.bounds = P, T, bounds
        self.sums = factors[: 2 * HV].view(2, HV, tokens)
        self.of_state = factors[2 * HV : 6 * HV].view(HV, tokens, 4)
        self.of_output = factors[6 * HV :].view(HV, tokens, 4)[..., :2]

    def same(self, other: "Before") -> bool:
        return all(torch.equal(x, y) for x, y in zip(vars(self).values(), vars(other).values(), strict=True))


def _both(inputs: dict[str, Any], bound: bool = False) -> tuple[Before, Before, torch.Tensor]:
    """From the Gluon kernel; from the stock kernels, with L."""
    q, k, g, beta = (inputs[name].detach() for name in ("q", "k", "g", "beta"))
    raw, norm = inputs["use_gate_in_kernel"], inputs["use_qk_l2norm_in_kernel"]
    A_log, dt_bias = (inputs[name].detach() if raw else None for name in ("A_log", "dt_bias"))
    chunks = cut_chunks(q.shape[0], q.shape[1], 64, None)
    given = ChunkInputs(q, k, g, beta, A_log, dt_bias, chunks, inputs["scale"] or 0.1, raw, norm, bound)
    found = Before(*launches.launch_solve(given))
    P, L, factors, bounds = scores(given, True, "tf32", 4)
    return found, Before(P, invert(L, q.dtype, q.shape[1], chunks, "tf32", 1), factors, bounds), L


@pytest.mark.gpu
@needs_hopper
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("K", [64, 128])
def test_everything_before_the_state_pass(case: Case, K: int) -> None:
    """Row factors and bounds in float32, P within a rounding, T as near to the inverse of L as from the stock."""
    found, stock, L = _both(make_inputs(replace(case, K=K), torch.bfloat16, DEVICE), bound=True)
    assert torch.equal(found.sums[1], stock.sums[1])
    for name in ("sums", "of_state", "of_output", "bounds"):
        torch.testing.assert_close(getattr(found, name), getattr(stock, name), rtol=2e-5, atol=2e-5)
    assert relative_error(found.P, stock.P) <= 0.5 * EPS
    torch.testing.assert_close(found.P.float(), stock.P.float(), rtol=1.01 * EPS, atol=1e-6)
    identity = torch.eye(64, dtype=torch.float64)
    wanted = torch.linalg.inv(L.double().cpu().tril(-1) + identity)
    assert relative_error(found.T, wanted) <= 1.1 * relative_error(stock.T, wanted) + 1e-3 * EPS
    for x in (found.P, found.T):
        assert not x.triu(1).any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("HV", [2, 8])
@pytest.mark.parametrize("K", [64, 128])
def test_strides(K: int, HV: int, launched: list[torch.Size]) -> None:
    """q and k in one tensor; one token's key, one sequence's queries expanded."""
    inputs = make_inputs(Case("strides", T=128, B=2, H=2, HV=HV, K=K), torch.bfloat16, DEVICE)
    q, k = (inputs[name].detach() for name in ("q", "k"))
    together = torch.cat([q, k], 2).split(2, 2)
    expanded = q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 128, -1, -1)
    rest = [inputs[name].detach() for name in ("v", "g", "beta")]
    for given in (together, expanded):
        o, _ = triton_chunk(*given, *rest, use_qk_l2norm_in_kernel=True)
        wanted, _ = triton_chunk(*(x.contiguous() for x in given), *rest, use_qk_l2norm_in_kernel=True)
        assert torch.equal(o, wanted)
    assert len(launched) == 4


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("HV", [2, 4, 6])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 64)])
@pytest.mark.parametrize("segments", [1, 3])
def test_integers_bit_for_bit(HV: int, K: int, V: int, segments: int, launched: list[torch.Size]) -> None:
    chunk = functools.partial(triton_chunk, segments=segments)
    assert_integers_exact(chunk, naive_gated_delta_rule, torch.bfloat16, K, V, HV, kinds=K // 8, gradients=False)
    assert launched


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize("K", [64, 128])
def test_segments(K: int, segments: int, launched: list[torch.Size]) -> None:
    """Cut by the bounds: heads that forget and heads that remember."""
    inputs = make_inputs(Case("segments", T=768, HV=2, K=K), torch.bfloat16, DEVICE)
    inputs["g"] = (inputs["g"].detach() * torch.tensor([60.0, 0.05], device=DEVICE)).requires_grad_()
    _assert_close([inputs], functools.partial(triton_chunk, segments=segments))
    assert len(launched) == 1


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("HV", [8, 16, 32])
def test_thousand_runs_are_identical(K: int, HV: int) -> None:
    """More programs than the chip holds at a time."""
    inputs = make_inputs(Case("repeat", T=2560, B=2, H=8, HV=HV, K=K, raw=True), torch.bfloat16, DEVICE)
    first, _, _ = _both(inputs, bound=True)
    q, k, g, beta, A_log, dt_bias = (inputs[name].detach() for name in ("q", "k", "g", "beta", "A_log", "dt_bias"))
    chunks = cut_chunks(2, 2560, 64, None)
    for _ in range(1000):
        given = ChunkInputs(q, k, g, beta, A_log, dt_bias, chunks, 0.1, True, True, True)
        assert first.same(Before(*launches.launch_solve(given)))
