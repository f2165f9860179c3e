"""The forms of the erase term in the Triton kernels against the recurrence in float64, forward and every gradient.

Without a GPU they run in Triton's interpreter: float32 and float16, small cases, chunks of 32 tokens.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from deltanet_kernels.gated_delta_rule import chips
from tests.kernels.cases import (
    ERASE_CASES,
    Case,
    assert_as_good,
    assert_close,
    assert_repeats,
    make_inputs,
    plainly_in,
    results,
    truth,
)
from tests.kernels.triton_mode import DEVICE, GPU, triton_chunk

OFFSETS = (0, 0, 1, 36, 40)
SMALL = [
    Case("off", T=40, H=1, HQ=2, HV=1, erase="off", raw=True),
    Case("off, packed, beta=0, closed gates", T=42, cu_seqlens=OFFSETS, erase="off", beta="zero", g="tokens"),
    Case("undecayed, shared heads", T=40, H=1, HQ=1, HV=2, V=24, erase="undecayed", raw=True),
    Case("undecayed, g=-150", T=33, erase="undecayed", g="shut"),
    Case("undecayed, closed tokens, beta=0", T=40, erase="undecayed", g="tokens", beta="zero"),
]
CASES = [*ERASE_CASES, *SMALL] if GPU else SMALL
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case: Case) -> None:
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_close(results(triton_chunk, inputs), truth(inputs), 3e-6 * case.condition)


@pytest.mark.parametrize("case", [
    Case("off", T=40, erase="off", raw=True),
    Case("off, beta=0, closed gates", T=33, erase="off", beta="zero", g="tokens"),
    Case("undecayed, K<V", T=40, V=24, erase="undecayed", raw=True),
    Case("undecayed, beta=0, closed gates", T=33, erase="undecayed", beta="zero", g="tokens"),
], ids=str)  # fmt: skip
def test_one_kernel_for_all_gradients(case: Case, one_kernel: list[str]) -> None:
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_close(results(triton_chunk, inputs), truth(inputs), 3e-6)
    assert chips.GRADIENTS in one_kernel


@pytest.mark.parametrize("case", [SMALL[0], SMALL[4]], ids=str)
def test_half_precision(case: Case) -> None:
    inputs = make_inputs(case, torch.float16, DEVICE)
    assert_close(results(triton_chunk, inputs), truth(inputs), 1.5 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize(("segments", "case"), [
    (2, Case("off, forgetting", T=70, erase="off", g="closed", beta="two")),
    (4, Case("off, composed", T=70, erase="off", g="zero", beta="two")),
    # A closed gate does not forget here: the undecayed prediction erases with the whole state.
    (2, Case("undecayed, closed", T=70, erase="undecayed", g="closed")),
    (4, Case("undecayed, composed", T=70, erase="undecayed", g="tokens")),
], ids=str)  # fmt: skip
def test_segments_know_what_they_forget(segments: int, case: Case) -> None:
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_close(results(partial(triton_chunk, segments=segments), inputs), truth(inputs), 3e-6)


def test_gradient_of_the_state_alone() -> None:
    case = Case("state", T=20, erase="undecayed")
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_close(results(triton_chunk, inputs, ("final_state",)), truth(inputs, ("final_state",)), 3e-6)


@pytest.mark.parametrize("case", [SMALL[0], SMALL[2]], ids=str)
def test_registered_operator_is_sound(case: Case) -> None:
    inputs = make_inputs(replace(case, T=20), torch.float32, DEVICE)
    arguments = [inputs[name].detach() for name in ("q", "k", "v", "g", "beta", "initial_state")]
    torch.library.opcheck(
        torch.ops.deltanet.chunk_forward.default,
        (*arguments, None, None, None, 1.0, True, False, True, True, "ieee", 1, case.erase),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiles_without_a_graph_break() -> None:
    case = Case("compile", T=130 if GPU else 20, K=64 if GPU else 16, erase="undecayed")
    inputs = make_inputs(case, torch.bfloat16 if GPU else torch.float32, DEVICE)
    eager = results(triton_chunk, inputs)
    backend = "inductor" if GPU else "aot_eager"
    compiled = results(torch.compile(triton_chunk, fullgraph=True, backend=backend), inputs)
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)


# On the GPU only: low precision, every head size, bits.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in ERASE_CASES if c.condition == 1], ids=str)
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, DEVICE)
    assert_as_good(results(triton_chunk, inputs), plainly_in(dtype, inputs), truth(inputs), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("erase", ["off", "undecayed"])
@pytest.mark.parametrize(("K", "V", "H", "HQ", "HV", "dtype"), [
    (64, 64, 2, 2, 2, torch.bfloat16),
    (64, 64, 1, 4, 2, torch.bfloat16),
    (128, 128, 2, 2, 2, torch.bfloat16),
    (128, 128, 1, 2, 4, torch.bfloat16),
    (100, 60, 1, 2, 4, torch.bfloat16),
    (256, 256, 1, 1, 1, torch.bfloat16),
    (128, 128, 1, 2, 1, torch.float32),
    (256, 64, 1, 1, 1, torch.float32),
], ids=str)  # fmt: skip
def test_head_sizes(
    erase: str, K: int, V: int, H: int, HQ: int, HV: int, dtype: torch.dtype
) -> None:  # fmt: skip
    inputs = make_inputs(Case("sizes", T=192, H=H, HQ=HQ, HV=HV, K=K, V=V, erase=erase), dtype, DEVICE)
    tolerance = 5e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_close(results(triton_chunk, inputs), truth(inputs), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("erase", ["off", "undecayed"])
@pytest.mark.parametrize("K", [64, 128])
def test_hundred_runs_are_identical(erase: str, K: int) -> None:
    inputs = make_inputs(Case("repeat", T=300, B=2, H=2, K=K, erase=erase), torch.bfloat16, DEVICE)
    assert_repeats(lambda: results(triton_chunk, inputs), 100)
