"""The gated delta rule read at boundaries: its forms against the recurrence in float64, and what a query sees.

Without a GPU the Triton kernels run in Triton's interpreter: float32 and float16, small heads.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_kernels import chunk_group_gated_delta_rule, naive_gated_delta_rule, naive_group_gated_delta_rule
from deltanet_kernels.gated_delta_rule import launch_plan
from deltanet_kernels.gated_delta_rule.chips import GRADIENTS, GRADIENTS_64
from deltanet_kernels.gated_delta_rule.launch_plan import LaunchPlan
from deltanet_kernels.group_rule.calls import GroupRuleCall
from deltanet_kernels.group_rule.chunk import chunk_group_triton, segments_for
from tests.kernels.cases import (
    Case,
    as_double,
    assert_as_good,
    assert_close,
    make_inputs,
    plainly_in,
    results,
)
from tests.kernels.triton_mode import DEVICE, GPU, by_pytorch, by_triton

CASES = [
    *(Case(f"T={T}", T=T, B=2, H=2) for T in (1, 31, 33, 128)),
    Case("query heads share a state", T=110, B=2, H=1, HQ=3, K=24, V=20),
    Case("value heads share key heads", T=100, H=2, HV=4, K=20, V=40),
    Case("one key head, 4 queries, 2 values", T=70, H=1, HQ=4, HV=2, V=24),
    Case("no norm, no state, scale", T=96, l2norm=False, initial_state=False, scale=-0.7),
    Case("g=0", T=100, g="zero"),
    Case("closed tokens", T=130, H=2, g="tokens"),
    Case("closed at a chunk's last token", T=130, H=2, g="last"),
    Case("g=-inf", T=100, H=2, g="reset"),
    Case("beta=0", T=100, beta="zero"),
    Case("beta=2 on equal keys, gated", T=130, H=2, beta="two", keys="equal", condition=5),
]
PACKED = [
    Case("packed, empty and single", T=165, H=2, cu_seqlens=(0, 0, 1, 2, 2, 33, 66, 98, 162, 165, 165)),
    Case("packed, shorter and longer", T=140, H=2, cu_seqlens=(0, 31, 95, 140)),
    Case("packed, query heads share a state", T=225, HQ=3, K=24, V=20, cu_seqlens=(0, 97, 97, 225), g="last"),
    Case("packed, value heads share key heads", T=100, H=1, HV=2, cu_seqlens=(0, 64, 100), initial_state=False),
]
INTERPRETED = {
    "T=33": (64,), "query heads share a state": (32, 64), "value heads share key heads": (64,),
    "no norm, no state, scale": (32,), "closed at a chunk's last token": (64,), "g=-inf": (32, 64), "beta=0": (64,),
}  # fmt: skip
CHOSEN = [(case, C) for case in CASES for C in ((32, 64) if GPU else INTERPRETED.get(case.name, ()))]
pytorch, triton = by_pytorch(chunk_group_gated_delta_rule), by_triton(chunk_group_gated_delta_rule)


def segmented(*tensors: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """The Triton form with every sequence cut into four segments."""
    return chunk_group_triton(GroupRuleCall(*tensors, **given), 4)


def arguments(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    given = make_inputs(case, dtype, device)
    return {name: given[name] for name in GroupRuleCall._fields if name in given}


@functools.cache
def truth_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return results(naive_group_gated_delta_rule, as_double(arguments(case, dtype)))


@pytest.mark.parametrize("case", [*CASES, *PACKED], ids=str)
def test_pytorch(case: Case) -> None:
    assert_close(results(pytorch, arguments(case, torch.float64)), truth_of(case, torch.float64), 1e-11)
    assert_close(results(pytorch, arguments(case)), truth_of(case), 2e-6 * case.condition)


def test_pytorch_in_bfloat16() -> None:
    """Computed in float32: only the inputs' gradients and the output are rounded."""
    case = CASES[4]
    wanted = truth_of(case, torch.bfloat16)
    assert_close(results(pytorch, arguments(case, torch.bfloat16)), wanted, torch.finfo(torch.bfloat16).eps / 2)


def test_reference_is_the_recurrence_of_the_tokens_before() -> None:
    """One query after n tokens reads what the rule itself reads after them, for every n that begins a group."""
    given = as_double(arguments(Case("prefixes", T=97, H=1, HQ=2)))
    found, state = naive_group_gated_delta_rule(**given)
    norm = {name: given[name] for name in ("scale", "initial_state", "use_qk_l2norm_in_kernel")}
    for start in (32, 64, 96):
        before = {name: given[name][:, :start] for name in ("k", "v", "g", "beta")}
        for t in range(start, min(start + 32, 97)):
            q = given["q"][:, t : t + 1].expand(-1, start, -1, -1)
            wanted, _ = naive_gated_delta_rule(q, **before, **norm)
            torch.testing.assert_close(found[:, t], wanted[:, -1], rtol=1e-12, atol=1e-12)
    wanted = naive_gated_delta_rule(**given)[1]
    torch.testing.assert_close(state, wanted, rtol=1e-12, atol=1e-12)


def in_chunks_of(C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one group (32), those of float32, or of two (64), those of 16 bits, whatever the dtype."""
    config = launch_plan.chunk_config
    monkeypatch.setattr(launch_plan, "chunk_config", lambda *call: replace(config(*call), C=C))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("case", "C"), CHOSEN, ids=str)
def test_triton(case: Case, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(C, monkeypatch)
    assert_close(results(triton, arguments(case, torch.float32, DEVICE)), truth_of(case), 2e-6 * case.condition)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("C", [32, 64])
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_sequences_in_one_row(case: Case, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into segments too; gradients are those of PyTorch."""
    in_chunks_of(C, monkeypatch)
    given = arguments(case, torch.float32, DEVICE)
    with pytest.raises(NotImplementedError, match="gradients of packed sequences"):
        triton(**given)
    with torch.no_grad():
        for form in (segmented, triton):
            found = dict(zip(("o", "final_state"), form(**given), strict=True))
            assert_close(found, {name: truth_of(case)[name] for name in found}, 2e-6)


@pytest.mark.parametrize("T", [100, 128])
def test_one_kernel_for_all_gradients(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of small bfloat16 heads that share nothing, here in float32."""
    in_chunks_of(64, monkeypatch)
    serving = LaunchPlan.serving
    kernels = {GRADIENTS: GRADIENTS_64}
    monkeypatch.setattr(
        LaunchPlan, "serving", lambda plan, stage, *copied: kernels.get(stage) or serving(plan, stage, *copied)
    )
    case = Case("joint", T=T, H=2, beta="zero")
    assert_close(results(triton, arguments(case, torch.float32, DEVICE)), truth_of(case), 3e-6)


def test_triton_in_half_precision() -> None:
    """The 16-bit paths of the kernels, which the interpreter computes rightly in float16 only."""
    for case in (CASES[2], CASES[4]):
        found = results(triton, arguments(case, torch.float16, DEVICE))
        assert_close(found, truth_of(case, torch.float16), 1.5 * torch.finfo(torch.float16).eps)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("case", "C"),
    [
        (Case("rows, 3 queries a state", T=4 * 64 - 5, B=2, HQ=3, K=24), 64),
        (Case("one head forgets, no state", T=200, H=2, g="heads", initial_state=False), 32),
        (Case("all is forgotten, an empty segment", T=6 * 64, g="tokens"), 64),
    ],
    ids=str,
)
def test_segments_are_exact(case: Case, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(C, monkeypatch)
    assert_close(results(segmented, arguments(case, torch.float32, DEVICE)), truth_of(case), 3e-6)


def test_long_sequences_are_cut_where_the_chip_is_idle() -> None:
    """By programs, chunks of a sequence and size of the keys: the number of segments on 132 multiprocessors."""
    for programs, chunks, K, wanted in (
        (3, 128, 64, 16), (6, 40, 64, 8), (6, 39, 64, 1), (3, 512, 64, 32), (12, 512, 64, 8), (33, 512, 128, 4),
        (34, 512, 128, 1), (3, 512, 129, 1),
    ):  # fmt: skip
        assert segments_for(programs, chunks, K, 132) == wanted


@pytest.mark.parametrize("form", [pytorch, triton], ids=["pytorch", "triton"])
def test_a_query_sees_exactly_the_groups_before_its_own(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a token's output: zero for its own group and later ones, of every earlier token not."""
    in_chunks_of(64, monkeypatch)
    given = arguments(Case("sight", T=100), torch.float32, "cpu" if form is pytorch else DEVICE)
    o, _ = form(**given)
    for t in (0, 31, 32, 63, 64, 95, 96):
        seen = 32 * (t // 32)
        grads = torch.autograd.grad(o[0, t].sum(), (given["k"], given["v"]), retain_graph=True)
        for name, grad in zip("kv", grads, strict=True):
            size = grad.abs().sum((0, 2, 3))
            assert not size[seen:].any(), (name, t)
            assert (size[:seen] > 0).all(), (name, t)


def test_refusals() -> None:
    given = arguments(Case("refused", T=33, H=2))
    with pytest.raises(ValueError, match=r"v: got shape \[1, 32, 2, 16\], needs"):
        chunk_group_gated_delta_rule(**given | {"v": given["v"][:, 1:]})
    with pytest.raises(TypeError, match=r"initial_state: got dtype torch\.float64, needs torch\.float32"):
        chunk_group_gated_delta_rule(**given | {"initial_state": given["initial_state"].double()})
    with pytest.raises(NotImplementedError, match=r"gradients in torch\.float16 of 1 key heads for 3 value heads"):
        triton(**arguments(Case("shared keys", T=33, HV=3), torch.float16, DEVICE))


# On the GPU only: low precision, every head size, bits.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c.condition == 1 and not c.HV], ids=str)
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    given = arguments(case, dtype, DEVICE)
    plain = plainly_in(dtype, given, naive_group_gated_delta_rule)
    assert_as_good(results(triton, given), plain, truth_of(case, dtype), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("HQ", [1, 2, 4, 8])
@pytest.mark.parametrize("T", [128, 150])
def test_every_head_size_and_group(K: int, HQ: int, T: int) -> None:
    """Complete chunks of heads of 128 that share no state take the Gluon kernel of the gradients."""
    case = Case("grouped", T=T, H=min(HQ, 2), HQ=HQ, K=K)
    found = results(triton, arguments(case, torch.bfloat16, DEVICE))
    assert_close(found, truth_of(case, torch.bfloat16), 1.5 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("3 queries a state", T=500, B=2, HQ=3, K=64),
        Case("whole chunks, 3 queries a state", T=512, HQ=3, K=128),
        Case("nothing decays", T=512, H=2, K=64, g="zero"),
        Case("one head forgets", T=512, H=2, K=128, g="heads"),
    ],
    ids=str,
)
def test_segments_in_bfloat16(case: Case) -> None:
    given = arguments(case, torch.bfloat16, DEVICE)
    plain = plainly_in(torch.bfloat16, given, naive_group_gated_delta_rule)
    assert_as_good(results(segmented, given), plain, truth_of(case, torch.bfloat16), torch.bfloat16)
