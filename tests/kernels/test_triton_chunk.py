"""The chunk kernels against the recurrence in float64: forward and every gradient, over all hazards.

Without a GPU they run in Triton's interpreter: float32, a selection of the cases, small heads.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from deltanet_kernels.gated_delta_rule import chips
from tests.kernels.cases import (
    CASES,
    ERASE_CASES,
    Case,
    assert_as_good,
    assert_close,
    make_inputs,
    plainly_in,
    relative_error,
    results,
    truth,
    truth_of,
)
from tests.kernels.triton_mode import DEVICE, GPU, triton_chunk

# The interpreter takes about a second per chunk and head: the cases that reach different code.
INTERPRETED = {
    "T=1", "T=65", "one key head, 2 queries, 4 values", "one key head, 4 queries, 2 values", "packed, empty and single",
    "packed, nothing but empty", "g=-inf", "closed at a chunk's last token", "beta=0", "zero keys", "raw gates, packed",
    "no state", "K<V",
}  # fmt: skip
OFFSETS = (0, 0, 1, 36, 40)
SMALL = [  # forms of the erase term, in chunks of 32 tokens
    Case("off", T=40, H=1, HQ=2, HV=1, erase="off", raw=True),
    Case("off, packed, beta=0, closed gates", T=42, cu_seqlens=OFFSETS, erase="off", beta="zero", g="tokens"),
    Case("undecayed, shared heads", T=40, H=1, HQ=1, HV=2, V=24, erase="undecayed", raw=True),
    Case("undecayed, g=-150", T=33, erase="undecayed", g="shut"),
    Case("undecayed, closed tokens, beta=0", T=40, erase="undecayed", g="tokens", beta="zero"),
]
UNSHARED = [
    Case("off", T=40, erase="off", raw=True),
    Case("off, beta=0, closed gates", T=33, erase="off", beta="zero", g="tokens"),
    Case("undecayed, K<V", T=40, V=24, erase="undecayed", raw=True),
    Case("undecayed, beta=0, closed gates", T=33, erase="undecayed", beta="zero", g="tokens"),
]
WHOLE = {"T=65", "beta=0", "g=-inf", "closed at a chunk's last token", "raw gates, packed", "K<V"}
CHOSEN = [*(case for case in CASES if GPU or case.name in INTERPRETED), *SMALL, *(ERASE_CASES if GPU else [])]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_float32(case: Case) -> None:
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_close(results(partial(triton_chunk, segments=1), inputs), truth_of(case), 3e-6 * case.condition)


@pytest.mark.parametrize("case", [*(c for c in CASES if c.name in WHOLE), *UNSHARED], ids=str)
def test_one_kernel_for_all_gradients(case: Case, one_kernel: list[str]) -> None:
    case = replace(case, HQ=None, HV=None)
    inputs = make_inputs(case, torch.float32, DEVICE)
    assert_close(results(partial(triton_chunk, segments=1), inputs), truth(inputs), 3e-6)
    assert chips.GRADIENTS in one_kernel


@pytest.mark.parametrize("HQ", [2, 4])
def test_forward_without_gradient_is_the_same_and_keeps_nothing(HQ: int) -> None:
    """Two query heads a state are read in the state pass, four in a pass of their own."""
    inputs = make_inputs(Case("inference", T=70, H=1, HQ=HQ), torch.float32, DEVICE)
    with_gradient, state = triton_chunk(**inputs)
    with torch.no_grad():
        o, final = triton_chunk(**inputs)
    assert relative_error(o, with_gradient) < 1e-6
    assert relative_error(final, state) < 1e-6
    kept = torch.ops.deltanet.chunk_forward(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state")), None, None, None,
        1.0, True, False, True, False, "ieee", 1, "decayed",
    )[2:]  # fmt: skip
    assert all(x.numel() == 0 for x in kept)


@pytest.mark.parametrize("erase", ["decayed", "undecayed"])
def test_compiles_without_a_graph_break(erase: str) -> None:
    case, dtype = (Case("compile", T=130, H=2, K=64), torch.bfloat16) if GPU else (Case("compile", T=20), torch.float32)
    inputs = make_inputs(replace(case, erase=erase), dtype, DEVICE)
    eager = results(triton_chunk, inputs)
    backend = "inductor" if GPU else "aot_eager"
    compiled = results(torch.compile(triton_chunk, fullgraph=True, backend=backend), inputs)
    assert all(torch.equal(eager[name], compiled[name]) for name in eager)


HALF = ("K=1,V=1", "raw gates, packed", "query heads share a state")


@pytest.mark.parametrize("case", [*(case for case in CASES if case.name in HALF), SMALL[0], SMALL[4]], ids=str)
def test_half_precision(case: Case) -> None:
    """The 16-bit paths of the kernels, which the interpreter computes rightly in float16 only."""
    inputs = make_inputs(case, torch.float16, DEVICE)
    assert_close(
        results(partial(triton_chunk, segments=1), inputs), truth(inputs), 1.5 * torch.finfo(torch.float16).eps
    )


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


def test_one_kernel_only_where_its_tiles_are_alike() -> None:
    """Narrow tiles beside wide ones are what ptxas 12.8 gets wrong; shared heads need the general kernels."""
    for K, V, HQ, dtype, wanted in (
        (64, 64, 2, torch.bfloat16, True),
        (40, 60, 2, torch.bfloat16, True),
        (16, 40, 2, torch.bfloat16, False),
        (128, 64, 2, torch.bfloat16, False),
        (64, 64, 4, torch.bfloat16, False),
        (64, 64, 2, torch.float16, False),
    ):
        assert (chips.GRADIENTS_64 in chips.kernels(K, V, dtype, (9, 0), HQ, 2, 2)) is wanted, (K, V, HQ, dtype)
        assert chips.GRADIENTS_64 not in chips.kernels(K, V, dtype, (8, 0), HQ, 2, 2), (K, V, HQ, dtype)


# On the GPU only: low precision, every head size, bits.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [c for c in (*CASES, *ERASE_CASES) if c.condition == 1], ids=str)
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype, DEVICE)
    assert_as_good(results(triton_chunk, inputs), plainly_in(dtype, inputs), truth(inputs), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("HQ", [2, 4, 8])
def test_many_query_heads_fit_into_shared_memory(K: int, HQ: int) -> None:
    inputs = make_inputs(Case("grouped", T=128, H=1, HQ=HQ, K=K), torch.bfloat16, DEVICE)
    assert_close(results(triton_chunk, inputs), truth(inputs), 1.5 * torch.finfo(torch.bfloat16).eps)
    with torch.no_grad():
        o, _ = triton_chunk(**inputs)
    assert relative_error(o, truth(inputs)["o"]) < torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
def test_cuda_graph_follows_changed_sequence_bounds() -> None:
    case = Case("graph", T=300, H=2, K=64, cu_seqlens=(0, 100, 300))
    inputs = {
        n: x.detach() if isinstance(x, torch.Tensor) else x
        for n, x in make_inputs(case, torch.bfloat16, "cuda").items()
    }
    triton_chunk(**inputs)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_chunk(**inputs)
    for bounds in ((0, 100, 300), (0, 1, 300), (0, 250, 260)):
        inputs["cu_seqlens"].copy_(torch.tensor(bounds))
        graph.replay()
        expected = triton_chunk(**inputs)
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))


@pytest.mark.gpu
def test_another_stream_and_no_synchronisation() -> None:
    inputs = make_inputs(Case("stream", T=200, H=2, K=64, cu_seqlens=(0, 50, 200)), torch.bfloat16, DEVICE)
    expected = results(triton_chunk, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            o, _ = triton_chunk(**inputs)
            o.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(o, expected["o"])


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
