"""The PyTorch forms of the rule with a decay per channel against its recurrence, and the rules that it contains."""

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
from tests.kernels.cases import Case, assert_close, make_inputs, relative_error, results
from tests.kernels.channel_cases import CHANNEL_CASES, ChannelCase, channel_truth, make_channel_inputs

IN_FLOAT32 = ("g=-inf", "gates of every size")
# PyTorch has no tiles: sizes that choose those of the kernels, and what is a part of another case.
SIMILAR = {
    "T=2", "T=17", "K=40", "K=100", "K=128", "K<V", "g=0", "strong gates", "value heads share a key head",
    "closed at a chunk's last token",
}  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CHANNEL_CASES if c.name not in SIMILAR], ids=str)
def test_chunks_equal_the_recurrence(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float64)
    wanted = channel_truth(inputs)
    assert_close(results(chunk_channel_gated_delta_rule, inputs), wanted, 1e-12)


@pytest.mark.parametrize("case", [c for c in CHANNEL_CASES if c.name in IN_FLOAT32], ids=str)
def test_float32(case: ChannelCase) -> None:
    inputs = make_channel_inputs(case, torch.float32)
    assert_close(results(chunk_channel_gated_delta_rule, inputs), channel_truth(inputs), 1e-5)


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
    ({"q": X[0]}, ValueError, "q: got shape .* needs 4 dimensions"),
    ({"v": X[:, :, :3]}, ValueError, "v: got 3 heads, needs a multiple of the 4 heads of k"),
    ({"q": X[:, :, :3]}, ValueError, "q: got 3 heads, needs a multiple of the 4 heads of k"),
    ({"k": X.double()}, TypeError, "k: got dtype"),
    ({"erase_key": X[:, :, :2]}, ValueError, "erase_key: got shape"),
    ({"erase_key": X.double()}, TypeError, "erase_key: got dtype"),
    ({"erase_key": X, "erase": False}, ValueError, "erase_key: got a tensor, needs None with erase=False"),
    ({"initial_state": X}, ValueError, "initial_state: got shape"),
    ({"initial_state": torch.zeros(2, 4, 8, 8).half()}, TypeError, "initial_state: got dtype"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens: got a batch of 2 rows"),
    ({"q": X[:, :0], "k": X[:, :0], "v": X[:, :0]}, ValueError, "q: got shape .* at least one token"),
    ({"g": None}, TypeError, "g: got NoneType, needs a tensor"),
]


def test_wrong_arguments_are_named() -> None:
    good = {"q": X, "k": X, "v": X, "g": GATES, "beta": BETA}
    for function in (
        chunk_channel_gated_delta_rule,
        fused_recurrent_channel_gated_delta_rule,
        naive_channel_gated_delta_rule,
    ):
        assert_refused(function, [(good | changes, *refusal) for changes, *refusal in WRONG])
