"""The chunked loss, top-k KL, the layer runner, Muon's orthogonalisation and schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from deltanet_hf import LayerTable
from deltanet_hf.models.far_positions import FarPositions
from deltanet_recipes.data.packing import make_rows
from deltanet_recipes.schema import Align
from deltanet_recipes.schema_sections import Optimizer
from deltanet_recipes.training.layer_runner import LayerRunner, document_boundaries
from deltanet_recipes.training.losses import ChunkedLoss, Head, KlTerms, live_chunk
from deltanet_recipes.training.objectives import Batch, DistilLoss
from deltanet_recipes.training.optim import make_optimizers, orthogonalise, rate_factor
from support.tiny_models import tiny_mixture, tiny_student, tiny_teacher

EOS = 2


def example(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """hidden [23, 8], weight [31, 8], labels [23], teacher hidden [23, 6], teacher weight [31, 6], float64."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight, other, other_weight = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((23, 8), (31, 8), (23, 6), (31, 6))
    )
    labels = torch.randint(0, 31, (23,), generator=g)
    labels[2], labels[3:6] = 0, -100
    return hidden, weight, labels, other, other_weight


@pytest.mark.parametrize(("ce_weight", "size"), [(0.0, 7), (0.3, 1), (0.3, 7), (0.3, 100)])
def test_chunked_loss_and_gradients_equal_the_plain_ones(ce_weight: float, size: int) -> None:
    terms = KlTerms(0.7, ce_weight)
    hidden, weight, labels, other, other_weight = example()
    h, h2 = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    chunk = live_chunk(Head(divisor=2.0, softcap=5.0), Head(softcap=4.0), terms)
    total, kl, ce = ChunkedLoss.apply(chunk, size, h, weight, labels, (other,), other_weight)
    (3.0 * total).backward()

    student = 5.0 * torch.tanh((h2 @ weight.T).float() / 2.0 / 5.0)
    scored = labels >= 0
    teacher = 4.0 * torch.tanh((other @ other_weight.T).float() / 4.0)
    p, q = (F.log_softmax(x, -1) for x in (teacher, student))
    each = (p.exp() * (p - q)).sum(-1)
    plain_kl = each[scored].sum()
    plain_ce = F.cross_entropy(student[scored], labels[scored], reduction="sum")
    plain = terms.kl_weight * plain_kl + terms.ce_weight * plain_ce
    (3.0 * plain).backward()
    torch.testing.assert_close(total.double(), plain.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kl.double(), plain_kl.detach().double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ce.double(), plain_ce.detach().double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.grad, h2.grad, rtol=1e-4, atol=1e-5)


def test_tokens_beyond_the_teachers_positions_have_cross_entropy_alone() -> None:
    hidden, weight, labels, other, other_weight = example()
    taught = torch.arange(23) % 12 < 8
    h, h2 = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    given, terms = (labels, (other, taught), other_weight), KlTerms(0.7, 0.3, far_ce_weight=0.5)
    total, kl, ce = ChunkedLoss.apply(live_chunk(Head(), Head(), terms), 7, h, weight, *given)
    total.backward()
    student, teacher = ((x @ y.T).float().log_softmax(-1) for x, y in ((h2, weight), (other, other_weight)))
    near, far = taught & (labels >= 0), ~taught & (labels >= 0)
    plain_kl = (teacher.exp() * (teacher - student)).sum(-1)[near].sum()
    near_ce, far_ce = (F.nll_loss(student[some], labels[some], reduction="sum") for some in (near, far))
    plain = 0.7 * plain_kl + 0.3 * near_ce + 0.5 * far_ce
    plain.backward()
    for found, wanted in ((total, plain), (kl, plain_kl), (ce, near_ce + far_ce)):
        torch.testing.assert_close(found.double(), wanted.detach().double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h.grad, h2.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_objective_compares_with_the_teacher_within_its_positions() -> None:
    """Of rows of 90 tokens and a teacher of 40 positions: KL and hidden error as of their first 40 tokens."""
    windows = replace(LayerTable.preset(4, "window", window=5), positions=FarPositions("yarn", 40, 120))
    student, teacher = tiny_mixture("llama", windows), tiny_teacher("llama", max_position_embeddings=40)
    ids = np.random.default_rng(0).integers(3, 97, (2, 90))

    def metrics(length: int, **options: Any) -> Any:
        rows = make_rows(ids[:, :length], np.ones((2, length), dtype=bool), EOS, False)
        terms = KlTerms(far_ce_weight=0.25 if options else 0.0)
        chunk = live_chunk(Head.of(student), Head.of(teacher), terms)
        return DistilLoss(student, teacher, chunk, 50, 0.5, **options)(Batch(rows, None, rows.scored.sum()))

    (total, (kl, ce, hidden)), (_, (short_kl, short_ce, short_hidden)) = metrics(90, positions=40), metrics(41)
    torch.testing.assert_close(torch.stack([kl, hidden]), torch.stack([short_kl, short_hidden]), rtol=1e-4, atol=1e-4)
    sums = 40 * (kl + 0.5 * hidden) + 0.25 * (89 * ce - 40 * short_ce)
    torch.testing.assert_close(total, sums / 89, rtol=1e-4, atol=1e-4)
    assert min(40 * kl, 40 * hidden, 89 * ce - 40 * short_ce) > 1
    rows = make_rows(ids[:, :41], np.ones((2, 41), dtype=bool), EOS, False)
    runners = LayerRunner(student), LayerRunner(teacher)
    layers = zip(*(runner.run_layers(runner.embed(rows, None))[1] for runner in runners), strict=True)
    errors = [(ours - theirs).square().sum(-1) / theirs.square().sum(-1) for ours, theirs in layers]
    torch.testing.assert_close(hidden, torch.stack(errors).mean(0)[rows.scored].mean(), rtol=1e-4, atol=1e-4)


def packed_rows(isolate: bool = True) -> torch.Tensor:
    ids = np.random.default_rng(0).integers(3, 97, (2, 25))
    ids[0, 9] = ids[0, 15] = ids[1, 20] = EOS
    return make_rows(ids, np.ones_like(ids, dtype=bool), EOS, isolate)


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "phi3", "smollm3", "granitemoe"])
@torch.no_grad()
def test_the_layer_runner_equals_the_models_own_forward(family: str, isolate: bool) -> None:
    rows = packed_rows(isolate)
    for model in (tiny_teacher(family), tiny_student(family, layers=(0, 2))):
        runner = LayerRunner(model)
        cu_seqlens = document_boundaries(rows.position_ids)
        walked, _ = runner.run_layers(runner.embed(rows, cu_seqlens))
        own = model.model(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
        torch.testing.assert_close(walked, own.last_hidden_state, rtol=1e-4, atol=1e-4)
        logits = Head.of(model).logits(walked, model.get_output_embeddings().weight)
        theirs = model(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False).logits
        torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [(), (0, 2)])
@torch.no_grad()
def test_packed_documents_do_not_leak(layers: tuple[int, ...]) -> None:
    model = tiny_teacher("llama") if not layers else tiny_student("llama", layers=layers)
    rows = packed_rows()
    runner = LayerRunner(model)
    before, _ = runner.run_layers(runner.embed(rows, document_boundaries(rows.position_ids)))
    rows.input_ids[0, 3] = 50 if int(rows.input_ids[0, 3]) != 50 else 51
    after, _ = runner.run_layers(runner.embed(rows, document_boundaries(rows.position_ids)))
    changed = (before - after).abs().amax(-1) > 1e-6
    assert changed[0, 3:10].all()
    assert not changed[0, 10:].any()
    assert not changed[1].any()


@torch.no_grad()
def test_without_isolation_documents_are_one_sequence() -> None:
    model, rows = tiny_student("llama"), packed_rows(isolate=False)
    runner = LayerRunner(model)
    assert document_boundaries(rows.position_ids) is None
    before, _ = runner.run_layers(runner.embed(rows, None))
    rows.input_ids[0, 3] += 1
    after, _ = runner.run_layers(runner.embed(rows, None))
    assert ((before - after).abs().amax(-1)[0, 3:] > 0).all()


def boundaries_of(ends: list[int]) -> torch.Tensor:
    """Boundaries of two rows of 512 tokens; in each, documents end at these places."""
    ids = np.full((2, 513), 5)
    ids[:, ends] = EOS
    boundaries = document_boundaries(make_rows(ids, np.ones_like(ids, dtype=bool), EOS, True).position_ids)
    assert boundaries is not None
    return boundaries


def test_boundaries_of_a_shape_have_one_of_few_lengths() -> None:
    one = document_boundaries(packed_rows().position_ids)
    assert one.tolist()[:6] == [0, 10, 16, 24, 45, 48]
    assert set(one.tolist()[5:]) == {48}
    assert {len(boundaries_of(ends)) for ends in ([3], [3, 9], [3, 9, 200, 400])} == {1 + 2 + 8}
    assert {len(boundaries_of([*range(3, last, 2)])) for last in (15, 30)} == {1 + 2 + 32}
    single = boundaries_of([*range(513)])  # every token is a document
    assert single.tolist() == [*range(1024), *[1024] * 3]


def test_orthogonalise_gives_singular_values_near_one() -> None:
    matrices = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


@torch.no_grad()
def test_muon_steps_by_the_orthogonalised_momentum_at_adamws_size() -> None:
    """Two steps of matrices of two shapes, with weight decay: 0.2 sqrt(larger side) times a matrix of singular values
    near 1, of the mean gradient as Nesterov's momentum has it."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (24, 40), (40, 20)]
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    means = [torch.zeros(shape) for shape in shapes]
    (muon,) = make_optimizers([{"params": weights, "weight_decay": 0.1, "muon": True}], fused=False)
    muon.param_groups[0]["lr"] = 0.5
    for _ in range(2):
        before = [weight.clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        muon.step()
        for weight, old, mean in zip(weights, before, means, strict=True):
            mean.lerp_(weight.grad, 0.05)
            (update,) = orthogonalise((0.05 * weight.grad + 0.95 * mean)[None].bfloat16()).float()
            wanted = old * (1 - 0.5 * 0.1) - 0.5 * 0.2 * max(weight.shape) ** 0.5 * update
            torch.testing.assert_close(weight.data, wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize(("schedule", "after_a_third"), [("cosine", 0.8), ("linear", 0.2 + 0.8 * 2 / 3)])
def test_schedule_warms_up_and_ends_at_its_ratio(schedule: Any, after_a_third: float) -> None:
    optimizer = Optimizer(schedule=schedule, warmup=0.1, final_ratio=0.2)
    stage = Align(tokens=64 * 101, sequence_length=64, batch_tokens=64, optimizer=optimizer)
    factors = [rate_factor(step, stage) for step in range(stage.steps)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10 + 30] == pytest.approx(after_a_third)
    assert max(factors) == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.2)
    assert factors[10:] == sorted(factors[10:], reverse=True)
