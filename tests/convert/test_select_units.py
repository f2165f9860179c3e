"""Switched models, probes and methods of `deltanet-hf select`, on models whose answer is known."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from deltanet_convert.select import methods, probe_text, probes, run
from deltanet_convert.select.methods import Forward, Gradient
from deltanet_convert.select.objectives import AnswerLoss, TextKL
from deltanet_convert.select.probe_text import FORMATS
from deltanet_convert.select.probes import haystack, selection_probes
from deltanet_convert.select.references import References, _problem
from deltanet_convert.select.scoring import ScaledLoss, Scorer
from deltanet_convert.select.switchable import SwitchableModel, blended
from deltanet_convert.select.units import SHORT, Candidates, Unit, evenly, every_nth
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks import prose_facts, recall_tasks
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.far_positions import FarPositions, place_positions
from deltanet_hf.models.restrict import restrict_heads, restrict_to_window
from support.far_model import FAR_HEAD, FAR_LAYER, far_folder, far_teacher
from support.tiny_conversion import tiny_tokenizer
from support.tiny_models import COMMON, LAYERS, tiny_teacher
from support.tiny_selection import tiny_selection

WINDOW, SINKS, LENGTH = 5, 2, 24
ALL = torch.arange(LENGTH)  # positions


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts, and plots that cost nothing."""
    monkeypatch.setattr(probes, "CHARACTERS", 2000)
    monkeypatch.setattr(run, "selection_plot", lambda selection: b"plot")


def eager(model: PreTrainedModel) -> PreTrainedModel:
    """With eager attention where SDPA would ignore the cap on attention scores."""
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    return model


def switchable(family: str, unit: str, **changes: Any) -> SwitchableModel:
    model = eager(tiny_teacher(family, **changes)).requires_grad_(False)
    return SwitchableModel(model, Candidates.of(model.config, unit), WINDOW, SINKS)


def rows(seed: int = 0, count: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, COMMON["vocab_size"], (count, LENGTH), generator=generator)


@torch.no_grad()
def test_kept_heads_have_positions_beyond_the_teachers() -> None:
    positions, kept = FarPositions("yarn", 128, 512), [(0, 1), (2, 0), (2, 1)]
    converted = restrict_heads(tiny_teacher("llama"), {0: [1], 2: [0, 1]}, WINDOW, SINKS)
    place_positions(converted, positions)
    teacher = tiny_teacher("llama")
    place_positions(teacher, positions)
    model = SwitchableModel(teacher, Candidates.of(teacher.config, "kv_head"), WINDOW, SINKS)
    model.keep(kept)
    torch.testing.assert_close(model.logits(rows(), ALL), converted(rows()).logits, atol=1e-5, rtol=1e-5)
    plain = switchable("llama", "kv_head")
    plain.keep(kept)
    assert (plain.logits(rows(), ALL) - model.logits(rows(), ALL)).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_all_kept_is_the_teacher_and_none_kept_is_the_window_of_the_mixer(family: str) -> None:
    changes = {"sliding_window": None} if family == "mistral" else {}
    teacher, ids = eager(tiny_teacher(family, **changes)), rows()
    model = switchable(family, "layer", **changes)
    model.keep(model.candidates.units)
    torch.testing.assert_close(model.logits(ids, ALL), teacher(ids).logits, atol=1e-5, rtol=1e-5)
    model.keep([])
    if model.candidates.local:  # the mixer restricts these layers too
        for index in model.candidates.local:
            model.layers[index].self_attn.forward = lambda *args, **kwargs: (
                torch.zeros_like(kwargs["hidden_states"]),
                None,
            )
            teacher.model.layers[index].self_attn.register_forward_hook(
                lambda *args: (torch.zeros_like(args[2][0]), None)
            )
    restricted = restrict_to_window(teacher, WINDOW, SINKS)
    torch.testing.assert_close(model.logits(ids, ALL), restricted(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt_oss"])
@torch.no_grad()
def test_heads_of_a_layer_together_are_the_layer_and_saved_activations_change_nothing(family: str) -> None:
    by_layer, by_head, ids = switchable(family, "layer"), switchable(family, "kv_head"), rows()
    layer = by_layer.candidates.units[-1][0]
    by_layer.keep([(layer,)])
    by_head.keep([(layer, 0), (layer, 1)])
    whole = by_layer.logits(ids, ALL)
    torch.testing.assert_close(by_head.logits(ids, ALL), whole, atol=1e-5, rtol=1e-5)
    by_head.keep([])
    none = by_head.logits(ids, ALL, record=True)
    one = []
    for head in range(2):
        by_head.keep([(layer, head)])
        one.append(by_head.logits_from(layer, ids, ALL))
        torch.testing.assert_close(one[-1], by_head.logits(ids, ALL), atol=1e-5, rtol=1e-5)
    for other in (none, whole, one[0]):
        assert float((other - one[1]).abs().max()) > 1e-4


@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3", "gpt_oss"])
def test_gate_derivatives_are_those_of_finite_differences(family: str) -> None:
    model = switchable(family, "kv_head")
    ids = rows()
    kept, unit = [model.candidates.units[0]], model.candidates.units[-1]
    objective = TextKL(ids, ids.shape[1] - WINDOW - SINKS)
    scorer = Scorer(model)
    scorer.losses(objective, None)
    model.keep(kept)
    found = scorer.gradients(objective, model.full.float(), torch.ones(1))
    assert found.shape == (LAYERS, COMMON["num_key_value_heads"])

    def loss(value: float) -> float:
        model.keep(kept)
        gates = model.full.float()
        gates[unit] = value
        model.gates = gates
        with torch.no_grad():
            total = objective.sums(model.logits(ids, objective.positions), 0) / objective.counts()
        model.gates = None
        return float(total)

    step = 2e-2
    numeric = (-3 * loss(0.0) + 4 * loss(step) - loss(2 * step)) / (2 * step)
    assert float(found[unit]) == pytest.approx(numeric, rel=0.05, abs=2e-4)
    assert scorer.losses(objective, kept).item() == pytest.approx(loss(0.0), abs=1e-5)
    assert scorer.losses(objective, [*kept, unit]).item() == pytest.approx(loss(1.0), abs=1e-5)


def test_gates_between_windows_have_the_derivatives_of_finite_differences() -> None:
    model, ids = switchable("llama", "kv_head"), rows()
    objective = TextKL(ids, ids.shape[1] - WINDOW - SINKS)
    scorer = Scorer(model)
    scorer.losses(objective, None)
    kept, near, other = [(0, 1)], [WINDOW] * LAYERS, [WINDOW, WINDOW + 5, WINDOW, WINDOW]
    model.keep(kept)
    model.windows, model.others = near, other

    def loss(value: float) -> float:
        model.gates = torch.full(model.full.shape, value)
        with torch.no_grad():
            total = objective.sums(model.logits(ids, objective.positions), 0) / objective.counts()
        model.gates = None
        return float(total)

    ends, slope = (loss(0.0), loss(1.0)), (loss(0.52) - loss(0.48)) / 0.04
    found = scorer.gradients(objective, torch.full(model.full.shape, 0.5), torch.ones(1)).sum(1)
    assert float(found[1]) == pytest.approx(slope, rel=0.05, abs=2e-4)
    assert float(found[1]) != 0
    assert found[[0, 2, 3]].tolist() == [0, 0, 0]
    model.others = None
    for windows, end in zip((near, other), ends, strict=True):
        model.windows = windows
        assert scorer.losses(objective, kept).item() == pytest.approx(end, abs=1e-6)


def test_blending_leaves_no_hook_behind_when_the_attention_fails() -> None:
    projection = torch.nn.Linear(4, 4)

    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        blended(projection, torch.ones(4), fail, fail)
    assert not projection._forward_pre_hooks


def test_layers_with_a_sliding_window_are_no_candidates() -> None:
    found = Candidates.of(tiny_teacher("gemma3_text").config, "kv_head")
    assert found.units == ((1, 0), (1, 1), (3, 0), (3, 1))
    assert found.local == (0, 2)
    assert "window of 8 tokens" in str(found.note())
    sliding = Candidates.of(tiny_teacher("mistral").config, "layer")
    assert sliding.units == ((0,), (1,), (2,), (3,))
    assert "keeps that window" in str(sliding.note())
    assert Candidates.of(tiny_teacher("smollm3").config, "layer").note() is None
    long = tiny_teacher("gemma2", sliding_window=SHORT + 1, max_position_embeddings=4 * SHORT).config
    assert Candidates.of(long, "layer") == Candidates(((0,), (1,), (2,), (3,)), (), None)
    long.sliding_window = SHORT
    assert Candidates.of(long, "layer").local == (0, 2)


def test_probes_fill_their_length_and_ask_for_what_the_text_says() -> None:
    tokenizer = tiny_tokenizer()
    text = haystack(tokenizer)
    found = selection_probes(tokenizer, text, 500, 3, 64, seed=5)
    assert [probe.format for probe in found] == [kind.name for kind in FORMATS for _ in range(3)]
    for probe in found:
        assert len(probe.ids) == 500
        first = min(begin for begin, _ in probe.answers)
        for begin, end in probe.answers:
            answer, before = probe.ids[begin:end], probe.ids[:first]
            places = [i for i in range(len(before)) if before[i : i + len(answer)] == answer]
            assert places, probe.format
    assert found == selection_probes(tokenizer, text, 500, 3, 64, seed=5)
    assert found != selection_probes(tokenizer, text, 500, 3, 64, seed=6)
    assert AnswerLoss(found).thinned(2).probes == [probe for place, probe in enumerate(found) if place % 3 != 1]


def test_probes_that_do_not_fit_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(UserError, match="--length 40: too short for a probe of the format"):
        selection_probes(tokenizer, haystack(tokenizer), 40, 1, 4, seed=0)
    with pytest.raises(UserError, match="shipped text has 100 tokens"):
        selection_probes(tokenizer, np.zeros(100, dtype=np.int64), 900, 1, 4, seed=0)


def word_lists(module: Any) -> set[str]:
    """The words in all tuples of a module."""
    lists = [value for value in vars(module).values() if isinstance(value, tuple)]
    return {word.lower() for words in lists for word in words if isinstance(word, str)}


def test_no_word_of_a_probe_is_a_key_or_value_of_the_evaluation() -> None:
    """Its longer names consist of words that are not ours either."""
    ours, theirs = word_lists(probe_text), word_lists(prose_facts) | word_lists(recall_tasks)
    assert {"danube", "bilbao", "sixth", "danish"} <= ours
    assert {"riga", "abernathy", "mason", "brass key", "lantern"} <= theirs
    assert not ours & {part for word in theirs for part in (word, *word.split())}


def test_no_value_of_a_probe_is_of_a_kind_that_the_evaluation_asks_for() -> None:
    """Those are numbers, words and pairs of words in lower case, and names of places."""
    places = {place.lower() for place in (*prose_facts._PLACES, *probe_text._TOWNS, *probe_text._RIVERS)}
    for kind in FORMATS:
        values = {kind.value(random.Random(seed)).strip(' "') for seed in range(200)}
        assert len(values) > 20
        assert not any(value.isdigit() or value.islower() or value.lower() in places for value in values)
        assert (kind.name == "prose") == all(value.isalpha() for value in values)  # those of the prose are languages


def test_no_template_of_a_probe_shares_three_words_with_the_evaluation() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"[a-z]+", text.lower())
        return {tuple(words[place : place + 3]) for place in range(len(words) - 2)}

    sources = [Path(str(module.__file__)).read_text() for module in (prose_facts, recall_tasks)]
    strings = [
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200
    ]
    theirs = set().union(*map(runs, strings))
    assert {("the", "secret", "code"), ("worked", "as", "a"), ("in", "those", "days")} <= theirs
    for kind in FORMATS:
        parts = (kind.statement, kind.end, kind.question, kind.end_of_answer, kind.heading)
        assert not theirs & set().union(*map(runs, parts)), kind.name


@pytest.mark.parametrize(
    ("method", "always", "unit"),
    [
        ("forward", 48, "layer"),
        ("forward", 1, "kv_head"),
        ("gradient", 48, "layer"),
        ("gradient", 48, "kv_head"),
        ("kl", 48, "kv_head"),
        ("kl", 1, "layer"),
    ],
)
def test_each_method_finds_the_only_unit_that_looks_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, always: int, unit: str
) -> None:
    monkeypatch.setattr(methods, "SCORED_ALWAYS", always)
    monkeypatch.setattr(methods, "SHORTLIST", 2)
    found = tiny_selection(far_folder(tmp_path / "far"), tmp_path / "s.json", "1", unit=unit, method=method)
    assert found.kept == (((FAR_LAYER,),) if unit == "layer" else ((FAR_LAYER, FAR_HEAD),))
    if method != "gradient":  # whose scores are estimates
        assert found.scores["rounds"][0]["score"] == pytest.approx(0, abs=1e-4)
    spread = 0 if unit == "layer" else 1  # the middle layer is the one that looks far, the middle head another of it
    assert found.scores["uniform"] == pytest.approx(spread, abs=1e-4)


@pytest.mark.slow
def test_the_shortlist_of_many_units_finds_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = far_teacher(num_hidden_layers=12).requires_grad_(False)
    switched = SwitchableModel(model, Candidates.of(model.config, "kv_head"), 6, 1)
    tokenizer = tiny_tokenizer()
    objective = AnswerLoss(selection_probes(tokenizer, haystack(tokenizer), 400, 4, 6, seed=0))
    scorer = Scorer(switched)
    references = References.measure(scorer, objective)
    scored: list[int] = []
    each = scorer.with_each

    def counted(objective: Any, layers: Any, change: Any) -> Any:
        scored.append(len(layers) * len(objective.ids))
        return each(objective, layers, change)

    monkeypatch.setattr(scorer, "with_each", counted)
    monkeypatch.setattr(methods, "SCORED_ALWAYS", 10)
    first = Forward(references.score(scorer, objective, "far"), switched.candidates.units)([])
    assert first.unit == (FAR_LAYER, FAR_HEAD)
    assert len(first.gains) == methods.SHORTLIST
    assert scored == [methods.SHORTLIST * 20]


def test_gains_are_what_a_unit_takes_off_the_score() -> None:
    """By forward passes; and by derivatives, here the squares of the gates, as the midpoint rule has their integral."""
    scorer: Any = SimpleNamespace(with_each=lambda *given: (torch.tensor([2.0]), torch.tensor([[1.0], [1.5]])))
    score = ScaledLoss(scorer, cast(Any, None), torch.tensor([1.0]), torch.tensor([3.0]))
    assert score.with_each([(0,)], [(1,), (2,)]) == ({(1,): 0.5, (2,): 0.25}, {(1,): 0.0, (2,): 0.25})
    slopes = torch.tensor([[0.8, 1.6], [2.4, 0.4]])
    derived: Any = SimpleNamespace(gates=lambda kept: torch.zeros(2, 2), gradients=lambda gates: -(gates**2) * slopes)
    keep = Gradient(derived, [(0, 0), (0, 1), (1, 0), (1, 1)])
    first, second = keep([]), keep([(1, 0)])
    assert (first.unit, first.score) == ((1, 0), pytest.approx(0.25))
    assert first.gains == pytest.approx({(0, 0): 0.25, (0, 1): 0.5, (1, 0): 0.75, (1, 1): 0.125})
    assert (second.unit, second.score) == ((0, 1), pytest.approx(-0.25))
    assert second.gains.keys() == {(0, 0), (0, 1), (1, 1)}


def test_formats_that_say_nothing_are_dropped(tmp_path: Path) -> None:
    score = ScaledLoss(cast(Any, None), cast(Any, None), torch.tensor([1.0]), torch.tensor([3.0]))
    assert score.rescaled(torch.tensor([[1.0], [2.0], [3.0]])).tolist() == [0.0, 0.5, 1.0]
    problems = [_problem(*losses) for losses in ((0.1, 0.19), (0.1, 0.21), (2.0, 2.3), (2.0, 2.4))]
    said = ["full attention gains nothing", None, "too hard for the teacher", None]
    assert [problem and problem.partition(" (")[0] for problem in problems] == said
    tiny_teacher("llama", max_position_embeddings=512).save_pretrained(tmp_path / "random")
    tiny_tokenizer().save_pretrained(tmp_path / "random")
    with pytest.raises(UserError, match=r"random: full attention answers no probe format better.*choose --method kl"):
        tiny_selection(tmp_path / "random", tmp_path / "s.json")


def test_even_distances() -> None:
    units: list[Unit] = [(i,) for i in range(30)]
    assert evenly(units, 7) == [(2,), (6,), (10,), (15,), (19,), (23,), (27,)]
    assert evenly(units[:3], 1) == [(1,)]
    assert evenly(units[:4], 4) == units[:4]
    assert every_nth(30, 7) == [(3,), (7,), (11,), (15,), (19,), (23,), (27,)]
    assert every_nth(30, 1) == [(15,)]
    assert every_nth(30, 29) == [(i,) for i in range(1, 30, 2)]
