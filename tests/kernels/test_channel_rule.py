"""The rule with a decay per channel, in PyTorch and by Triton, against its recurrence, and the rules that it contains.

Without a GPU the kernels run in Triton's interpreter: float32, a selection of the cases, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_kernels import (
    chunk_channel_gated_delta_rule,
    fused_recurrent_channel_gated_delta_rule,
    naive_channel_gated_delta_rule,
    naive_gated_delta_rule,
)
from support.refusals import assert_refused
from tests.kernels.cases import Case, assert_as_good, assert_close, make_inputs, plainly_in, relative_error, results
from tests.kernels.channel_cases import CHANNEL_CASES, ChannelCase, channel_truth, make_channel_inputs
from tests.kernels.triton_mode import DEVICE, GPU, by_pytorch, by_triton

IN_FLOAT32 = ("g=-inf", "gates of every size")
# PyTorch has no tiles: sizes that choose those of the kernels, and what is a part of another case.
SIMILAR = {
    "T=2", "T=17", "K=40", "K=100", "K=128", "K<V", "g=0", "strong gates", "value heads share a key head",
    "closed at a chunk's last token",
}  # fmt: skip
INTERPRETED = {
    "T=1", "T=65", "gdn2", "one key head, 2 queries, 4 values", "packed, nothing but empty", "strong gates, gdn2",
    "g=-inf", "packed, no state", "K>V", "two products per chunk",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("poisoned_memory")
triton_chunk = by_triton(chunk_channel_gated_delta_rule)
triton_recurrent = by_triton(fused_recurrent_channel_gated_delta_rule)
FORMS = {"pytorch": by_pytorch(chunk_channel_gated_delta_rule), "triton": triton_chunk}
CHOSEN = [
    *(("pytorch", case) for case in CHANNEL_CASES if case.name in IN_FLOAT32),
    *(("triton", case) for case in CHANNEL_CASES if GPU or case.name in INTERPRETED),
]


@pytest.mark.parametrize("case", [c for c in CHANNEL_CASES if c.name not in SIMILAR], ids=str)
def test_chunks_equal_the_recurrence(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float64)
    wanted = channel_truth(inputs)
    assert_close(results(chunk_channel_gated_delta_rule, inputs), wanted, 1e-12)


@pytest.mark.parametrize(("form", "case"), CHOSEN, ids=str)
def test_float32(form: str, case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32, DEVICE)
    assert_close(results(FORMS[form], inputs), channel_truth(inputs), 1e-5)


def test_half_precision() -> None:
    """The 16-bit paths of the kernels, which the interpreter computes rightly in float16 only."""
    inputs = make_channel_inputs(ChannelCase("half", T=70, g="strong", rule="gdn2"), torch.float16, DEVICE)
    assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1.5 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("rule", ["kda", "gdn2", "gla"])
@torch.no_grad()
def test_token_by_token_equals_chunks(rule: str) -> None:
    case = ChannelCase("steps", T=70, B=2, H=2, HQ=4, V=24, g="strong", rule=rule)
    inputs = make_channel_inputs(case, torch.float64)
    o, state = chunk_channel_gated_delta_rule(**inputs)
    current, steps = inputs["initial_state"], []
    tokens = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name != "initial_state"}
    options = {name: x for name, x in inputs.items() if not isinstance(x, torch.Tensor)}
    for start, end in ((0, 3), (3, 4), (4, 12), (12, 69), (69, 70)):
        part = {name: x[:, start:end] for name, x in tokens.items()}
        step, current = fused_recurrent_channel_gated_delta_rule(**part, **options, initial_state=current)
        steps.append(step)
    assert relative_error(torch.cat(steps, 1), o) < 1e-12
    assert relative_error(current, state) < 1e-12


RECURRENT = [
    ChannelCase("decode", T=1, B=3, H=2, HV=4, HQ=2, rule="gdn2"),
    ChannelCase("query heads share a state", T=4, H=1, HQ=4, HV=2, K=24, V=20),
    ChannelCase("packed", T=9, H=1, cu_seqlens=(0, 0, 1, 5, 8), rule="gla"),
    ChannelCase("closed gates, no norm, no state", T=5, H=1, g="reset", l2norm=False, scale=0.7, initial_state=False),
]


@pytest.mark.parametrize("case", RECURRENT, ids=str)
@torch.no_grad()
def test_recurrent(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32, DEVICE)
    with torch.enable_grad():
        wanted = channel_truth(inputs)
    o, state = triton_recurrent(**inputs)
    assert relative_error(o, wanted["o"]) < 1e-6
    assert relative_error(state, wanted["final_state"]) < 1e-6


def test_recurrent_calls_with_gradients_take_the_chunks() -> None:
    inputs = make_channel_inputs(ChannelCase("gradient", T=3), torch.float32, DEVICE)
    o, _ = triton_recurrent(**inputs)
    (gradient,) = torch.autograd.grad(o.sum(), inputs["g"])
    assert gradient.abs().sum() > 0


def test_recurrent_calls_are_refused_with_the_reason() -> None:
    with pytest.raises(NotImplementedError, match="float64"):
        triton_recurrent(**make_channel_inputs(ChannelCase("double", T=2), torch.float64, DEVICE))


def test_equal_channels_are_the_gated_delta_rule() -> None:
    inputs = make_inputs(Case("equal", T=70, B=2, H=2, HQ=4), torch.float64)
    wanted = results(naive_gated_delta_rule, inputs)
    wide = {**inputs, "g": inputs["g"].detach().unsqueeze(-1).repeat(1, 1, 1, 16).requires_grad_()}
    for name in ("use_gate_in_kernel", "use_beta_sigmoid_in_kernel"):
        wide.pop(name)
    found = results(chunk_channel_gated_delta_rule, wide)
    found["dg"] = found["dg"].sum(-1)
    assert_close(found, wanted, 1e-12)


def test_erase_key_and_beta_are_the_erase_and_write_gates() -> None:
    """S_t = (I - k (b * k)^T) Diag(e^g) S + k (w * v)^T, as Gated DeltaNet-2 writes it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, b, w = (torch.randn(1, 30, 2, 8, generator=generator, dtype=torch.float64) for _ in range(5))
    k, b, w, g = k / k.norm(dim=-1, keepdim=True), b.sigmoid(), w.sigmoid(), -torch.rand(1, 30, 2, 8).double()
    o, _ = chunk_channel_gated_delta_rule(q, k, w * v, g, torch.ones(1, 30, 2).double(), b * k, scale=1.0)
    state = torch.zeros(2, 8, 8, dtype=torch.float64)
    for t in range(30):
        decayed = g[0, t].exp().unsqueeze(-1) * state
        key, erased = k[0, t].unsqueeze(-1), (b * k)[0, t].unsqueeze(-2)
        state = decayed - key @ (erased @ decayed) + key @ (w * v)[0, t].unsqueeze(-2)
        torch.testing.assert_close(o[0, t], (q[0, t].unsqueeze(-2) @ state).squeeze(-2))


@torch.no_grad()
def test_autocast_does_not_lower_the_precision() -> None:
    inputs = make_channel_inputs(ChannelCase("autocast", T=20, H=2))
    o, _ = chunk_channel_gated_delta_rule(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        lowered, _ = chunk_channel_gated_delta_rule(**inputs)
    assert torch.equal(o, lowered)


X = torch.zeros(2, 5, 4, 8)
GATES, BETA = torch.zeros(2, 5, 4, 8), torch.zeros(2, 5, 4)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"g": BETA}, ValueError, r"g: got shape \[2, 5, 4\], needs \[B, T, HV, K\]"),
    ({"g": GATES + 0.5}, ValueError, "g: got a log decay of 0.5, needs at most 0"),
    ({"beta": GATES}, ValueError, "beta: got shape"),
    ({"q": X[..., :7]}, ValueError, "k: got shape"),
    ({"v": X[:, :, :3]}, ValueError, "g: got shape .* needs .* = .2, 5, 3, 8."),
    ({"q": X[:, :, :3]}, ValueError, "q: got 3 heads, needs a multiple of the 4 heads of k"),
    ({"k": X.double()}, TypeError, "k: got dtype"),
    ({"erase_key": X[:, :, :2]}, ValueError, "erase_key: got shape"),
    ({"erase_key": X.double()}, TypeError, "erase_key: got dtype"),
    ({"erase_key": X, "erase": False}, ValueError, "erase_key: got a tensor, needs None with erase=False"),
    ({"initial_state": X}, ValueError, "initial_state: got shape"),
    ({"initial_state": torch.zeros(2, 4, 8, 8).half()}, TypeError, "initial_state: got dtype"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens: got a batch of 2 rows"),
]


def test_wrong_arguments_are_named() -> None:
    good = {"q": X, "k": X, "v": X, "g": GATES, "beta": BETA}
    for function in (
        chunk_channel_gated_delta_rule,
        fused_recurrent_channel_gated_delta_rule,
        naive_channel_gated_delta_rule,
    ):
        assert_refused(function, [(good | changes, *refusal) for changes, *refusal in WRONG])


# On the GPU only: low precision, every head size.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHANNEL_CASES, ids=str)
def test_low_precision(case: ChannelCase, dtype: torch.dtype) -> None:
    inputs = make_channel_inputs(case, dtype, DEVICE)
    plain = plainly_in(dtype, inputs, naive_channel_gated_delta_rule)
    assert_as_good(results(triton_chunk, inputs), plain, channel_truth(inputs), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("HQ", [2, 4])
@pytest.mark.parametrize("rule", ["kda", "gdn2", "gla"])
def test_every_head_size_and_group(K: int, HQ: int, rule: str) -> None:
    for kind in ("random", "strong"):
        inputs = make_channel_inputs(ChannelCase("grouped", T=200, H=2, HQ=HQ, K=K, g=kind, rule=rule),
                                     torch.bfloat16, DEVICE)  # fmt: skip
        assert_close(results(triton_chunk, inputs), channel_truth(inputs), 1.5 * torch.finfo(torch.bfloat16).eps)
