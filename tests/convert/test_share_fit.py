"""The share of the state beside a window: its start completes softmax attention, on any calibration text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_convert.start import share_fit
from deltanet_convert.start.copy_weights import copy_attention
from deltanet_convert.start.fitted import start_fitted
from deltanet_convert.start.gate_fit import GateFit, search_memory
from deltanet_convert.start.samples import LayerCalibration, Samples
from deltanet_convert.start.share_fit import ShareFit, missed_scores
from deltanet_hf.mixers import recommended
from deltanet_hf.mixers.layer.attention_shape import AttentionShape
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from support.blank_layers import blank_layer, layer_inputs
from support.tiny_models import READS_ALL, tiny_teacher

pytestmark = pytest.mark.usefixtures("short_fit")

HEADS, KV_HEADS, SIZE, TOKENS = 6, 2, 8, 40


def branch(
    family_window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    window: int = 6,
    delayed: bool = False,
) -> WindowBranch:
    shape = AttentionShape(
        HEADS, SIZE, HEADS, KV_HEADS, KV_HEADS, scaling=scaling, family_window=family_window, softcap=softcap
    )
    _, settings = recommended("gated_deltanet+window")
    changes = {"window": window, "sinks": 2, **({} if delayed else READS_ALL)}
    made = WindowBranch(shape, replace(settings, **changes)).eval().requires_grad_(False)
    made.share_proj.weight.fill_(torch.nan)
    made.share_proj.bias.fill_(torch.nan)
    return made


def inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(2, tokens, count, SIZE, generator=generator) for count in heads)
    return q, k, v


def attention(made: WindowBranch, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Softmax attention to the tokens of a mask [T, T]; zeros where it sees none."""
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=2) for part in (k, v))
    scores = torch.einsum("nthd,nshd->nhts", q, k) * made.scale
    if made.softcap is not None:
        scores = (scores / made.softcap).tanh() * made.softcap
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("nhts,nshd->nthd", weights, v)


def masks(family_window: int | None, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """The tokens that the teacher's attention sees, and those of them that the window misses: both [T, T]."""
    place = torch.arange(TOKENS)
    distance = place[:, None] - place
    sees = distance >= 0
    if family_window is not None:
        sees = sees & (distance < family_window)
    return sees, sees & (distance >= window) & (place >= sinks)


@pytest.mark.parametrize(
    ("family_window", "scaling", "softcap", "at_once"),
    [(None, None, None, TOKENS), (None, 0.8, 1.5, 7), (15, None, None, 1)],
)
@torch.no_grad()
def test_missed_scores_by_definition(
    family_window: int | None,
    scaling: float | None,
    softcap: float | None,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share_fit, "QUERIES_AT_ONCE", at_once)
    made, (q, k, _) = branch(family_window, scaling, softcap), inputs()
    _, misses = masks(family_window, made.window, made.sinks)
    scores = torch.einsum("nthd,nshd->nths", q, k.repeat_interleave(HEADS // KV_HEADS, dim=2)).double() * made.scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    sums = (scores.exp() * misses[:, None]).sum(-1) / misses.sum(-1)[:, None]
    torch.testing.assert_close(missed_scores(made, q, k), sums.log().float(), equal_nan=True)


@pytest.mark.parametrize(
    ("family_window", "scaling", "softcap"), [(None, None, None), (None, 0.8, 1.5), (15, None, None)]
)
@torch.no_grad()
def test_with_the_true_far_attention_the_start_is_complete_softmax_attention(
    family_window: int | None, scaling: float | None, softcap: float | None
) -> None:
    made, (q, k, v) = branch(family_window, scaling, softcap), inputs()
    sees, misses = masks(family_window, made.window, made.sinks)
    missed = missed_scores(made, q, k)
    assert torch.equal(missed.isnan(), ~misses.any(-1)[:, None].expand(2, -1, HEADS))
    f = 1000 * missed.nan_to_num()  # inputs that hold what the regression looks for, so large that the ridge is nothing
    fit = ShareFit(made, f, missed)
    window_output, lse = made.attend(q, k, v, None)
    share = fit(f, lse)
    complete = attention(made, q, k, v, sees)
    torch.testing.assert_close(
        window_output + share * (attention(made, q, k, v, misses) - window_output), complete, rtol=1e-4, atol=1e-4
    )
    assert float((window_output - complete).abs().max()) > 0.1  # the window alone is far from it

    fit.slow()
    unseen = made.unseen(torch.arange(1, TOKENS + 1)).clamp_min(1)[None, :, None, None]
    torch.testing.assert_close(fit(f, lse).logit(), share.logit() - 0.5 * (unseen / 128).log())

    share = fit(f, lse)
    basis = torch.linalg.qr(torch.randn(HEADS, HEADS, generator=torch.Generator().manual_seed(1))).Q
    fit.fold(basis)
    torch.testing.assert_close(
        made.mixing_gate(made.share_proj(f @ basis), lse, torch.arange(1, TOKENS + 1)[None]), share.squeeze(-1)
    )


@torch.no_grad()
def test_rows_that_fit_into_the_window_have_no_share_and_no_nan() -> None:
    made, (q, k, v) = branch(window=TOKENS - 2), inputs()
    missed = missed_scores(made, q, k)
    assert bool(missed.isnan().all())
    f = torch.randn(2, TOKENS, 3, generator=torch.Generator().manual_seed(2))
    fit = ShareFit(made, f, missed)
    window_output, lse = made.attend(q, k, v, None)
    assert not fit(f, lse).any()
    torch.testing.assert_close(window_output, attention(made, q, k, v, masks(None, 0, 0)[0]), rtol=1e-4, atol=1e-5)
    fit.fold(torch.ones(3, HEADS))
    assert all(bool(parameter.isfinite().all()) for parameter in made.parameters())


def started(family: str, sequences: int, tokens: int, window: int) -> tuple[Any, Any, Tensor, dict[str, Any], Any]:
    """A started layer, the teacher's attention, its inputs, its other arguments, and the figures of the fit."""
    attention, states, kwargs = layer_inputs(tiny_teacher(family, attn_implementation="eager"), 0, sequences, tokens)
    layer: Any = blank_layer(family, "faithful", 0, mixer="gated_deltanet+window", window=window, sinks=1, **READS_ALL)
    figures = start_fitted(attention, layer, LayerCalibration(states, kwargs))
    return layer.eval(), attention, states, kwargs, figures


@torch.no_grad()
def test_a_layer_whose_calibration_fits_into_the_window_is_the_teachers_attention() -> None:
    layer, attention, states, kwargs, figures = started("llama", 2, 24, window=64)
    wanted = torch.cat([attention(hidden_states=row, **kwargs)[0] for row in states.split(1)])
    torch.testing.assert_close(layer(states, **kwargs)[0], wanted, rtol=1e-4, atol=1e-4)
    assert figures["fit_mse"] < 1e-8
    assert all(bool(parameter.isfinite().all()) for parameter in layer.parameters())


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{}, {"mixer": "deltaproduct+window"}, {"expand_kv": True, "shared_kv": True}], ids=str
)
def test_a_sample_projects_once_and_holds_what_operator_and_window_read(changes: dict[str, Any]) -> None:
    attention, states, kwargs = layer_inputs(tiny_teacher("qwen3", attn_implementation="eager"), 0, 2, 20)
    layer: Any = blank_layer(
        "qwen3", "faithful", 0, **{"mixer": "gated_deltanet+window", "window": 4, **READS_ALL, **changes}
    ).eval()
    copy_attention(attention, layer)
    calls: list[str] = []
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: calls.append(name))
    samples = Samples(attention, layer, states, kwargs)
    assert sorted(calls) == ["k_proj"] * 2 + ["q_proj"] * 2 + ["v_proj"] * 2
    for sample in samples.kept:
        wanted = layer.project_qkv(sample.x, kwargs["position_embeddings"])
        assert all(torch.equal(*pair) for pair in zip((sample.q, sample.k, sample.v), wanted, strict=True))
        parts = layer.window_inputs(layer.project(sample.x), kwargs["position_embeddings"])
        assert torch.equal(sample.window_output, layer.window_branch.attend(*parts, None)[0])


@torch.no_grad()
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (3, 9)])
def test_few_and_short_sequences(sequences: int, tokens: int) -> None:
    layer, _, states, kwargs, figures = started("qwen3", sequences, tokens, window=3)
    assert all(bool(parameter.isfinite().all()) for parameter in layer.parameters())
    assert bool(layer(states, **kwargs)[0].isfinite().all())
    assert 0 <= figures["fit_mse"] < 2


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # layer 0 of Gemma 2 slides over 8 tokens
def test_the_state_takes_error_off_the_window_and_the_folded_layer_is_the_fitted_one(family: str) -> None:
    attention, states, kwargs = layer_inputs(tiny_teacher(family, attn_implementation="eager"), 0, 3, 60)
    layer: Any = blank_layer(
        family, "faithful", 0, mixer="gated_deltanet+window", window=4, sinks=1, **READS_ALL
    ).eval()
    copy_attention(attention, layer)
    torch.manual_seed(0)
    samples = Samples(attention, layer, states, kwargs)
    fit = GateFit(layer, samples)
    search_memory(fit, samples.search_part())
    generator = torch.Generator().manual_seed(1)
    alone, found = 0.0, 0.0
    for sample in samples.kept:
        alone += float((layer.o_proj(sample.window_output.flatten(-2)) - sample.output).square().sum())
        found += float((fit(sample) - sample.output).square().sum())
    assert found < 0.9 * alone
    for parameter in fit.parameters():  # values that all differ
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    fit.fold()
    for sample in samples.kept:
        torch.testing.assert_close(layer(sample.x, **kwargs)[0], fit(sample), rtol=1e-4, atol=1e-4)
