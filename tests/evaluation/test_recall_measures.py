"""Recall measures on models whose recall is known: always right, always wrong, a copy, a window."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures import text_scores
from deltanet_hf.evaluation.measures.probes import Probe, answer_outcomes
from deltanet_hf.evaluation.measures.relative import Clusters, paired_difference, relative_score
from deltanet_hf.evaluation.measures.text_scores import token_measures
from deltanet_hf.evaluation.tasks import prose_facts as prose_module
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.prose_facts import prose_facts
from deltanet_hf.evaluation.tasks.recall_tasks import associative_recall, needles
from support.tiny_models import tiny_teacher

VOCABULARY = 340


class Oracle:
    """A model that knows the next token of everything it is given; every `wrong`-th call place is wrong."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong, self.device, self.dtype = wrong, torch.device("cpu"), torch.float32
        self.config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))

    def __call__(self, ids: torch.Tensor, logits_to_keep: int | torch.Tensor, **kwargs: Any) -> Any:
        following = ids.roll(-1, dims=1)
        if self.wrong:
            following = (following + 1) % VOCABULARY
        logits = 100.0 * torch.nn.functional.one_hot(following, VOCABULARY).float()
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=logits[:, kept])


@pytest.fixture(scope="module")
def haystack(tokenizer: PreTrainedTokenizerFast) -> Haystack:
    words = random.Random(0)
    text = " ".join(f"The {words.choice('abcdefgh')}at sat on mat {words.randrange(99)}." for _ in range(600))
    return Haystack(tokenizer, np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"]))


def builders(tokenizer: PreTrainedTokenizerFast, haystack: Haystack) -> dict[str, list[Probe]]:
    return {
        "needles": needles(tokenizer, haystack.ids, 700, 3),
        "pairs": associative_recall(tokenizer, 8, 3),
        "prose": prose_facts(tokenizer, haystack, 1500, 3),
    }


def test_an_oracle_answers_all_and_a_wrong_one_none(tokenizer: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    for probes in builders(tokenizer, haystack).values():
        right, wrong = answer_outcomes(Oracle(), probes), answer_outcomes(Oracle(wrong=True), probes)  # type: ignore[arg-type]
        assert right.exact.all()
        assert right.first.all()
        assert right.nats.max() < 1e-6
        assert not wrong.exact.any()
        assert not wrong.first.any()
        lengths = [end - begin for probe in probes for begin, end in probe.answers]
        np.testing.assert_allclose(wrong.nats, 100 * np.array(lengths), rtol=1e-6)


def test_facts_tell_the_answers_and_the_control_does_not(
    tokenizer: PreTrainedTokenizerFast, haystack: Haystack
) -> None:
    made = builders(tokenizer, haystack)
    assert made == builders(tokenizer, haystack)
    assert {len(probe.ids) for probe in made["needles"]} <= {699, 700}
    for name, probes in made.items():
        assert len({probe.ids for probe in probes}) == 3, name
        orders = []
        for probe in probes:
            told = [probe.ids[begin:end] for begin, end in probe.facts]
            assert max(end for _, end in probe.facts) <= min(begin for begin, _ in probe.answers), name
            control = probe.without_facts()
            assert control.facts == ()
            assert len(control.ids) == len(probe.ids) - sum(map(len, told)), name
            body = tokenizer.decode(control.ids[: control.answers[0][0]])
            places = []
            for (begin, end), (cut, stop) in zip(probe.answers, control.answers, strict=True):
                answer = probe.ids[begin:end]
                assert control.ids[cut:stop] == answer
                asked = probe.ids[begin - 1 : end]  # in lists, with its key
                assert any(_contains(fact, asked) for fact in told), name
                places.append(next(i for i in range(begin) if probe.ids[i : i + len(asked)] == asked))
                if name == "needles":
                    assert tokenizer.decode(answer) not in body
                    line = tokenizer.decode(probe.ids[:end]).splitlines()[-1]  # names what the fact is about
                    assert any(line in tokenizer.decode(fact) for fact in told), name
            orders.append(places == sorted(places))
        assert not all(orders), name
    with pytest.raises(UserError, match="needles at 100 tokens"):
        needles(tokenizer, haystack.ids, length=100)


@pytest.mark.parametrize("name", ["needles", "prose"])
def test_facts_are_spread_over_the_text(name: str, tokenizer: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    probes = {
        "needles": lambda: needles(tokenizer, haystack.ids, 2000, 40),
        "prose": lambda: prose_facts(tokenizer, haystack, 3000, 40),
    }[name]()
    quarters = []
    for probe in probes:
        text = probe.without_facts().answers[0][0]  # tokens before the answers, without the facts
        told = 0
        for begin, end in probe.facts:
            quarters.append(4 * (begin - told) // text)
            told += end - begin
    shares = np.bincount(quarters, minlength=4) / len(quarters)
    assert shares.min() > 0.15, shares  # a quarter on average


def _contains(fact: tuple[int, ...], answer: tuple[int, ...]) -> bool:
    return any(fact[i : i + len(answer)] == answer for i in range(len(fact)))


def test_no_word_of_the_prose_facts_stands_twice_in_its_list() -> None:
    """With a word that does, two people may have the same value."""
    for words in (
        prose_module._TITLES,
        prose_module._NAMES,
        *(values for values, _, _ in prose_module._KINDS.values()),
    ):
        assert len(set(words)) == len(words)


def test_prose_names_decide_which_value_is_right(tokenizer: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    for probe in prose_facts(tokenizer, haystack, 1600, 4):
        assert len(probe.ids) == 1600
        told = [tokenizer.decode(probe.ids[begin:end]) for begin, end in probe.facts]
        assert len(told) == len(probe.answers) == 6
        for begin, end in probe.answers:
            question = tokenizer.decode(probe.ids[:begin]).splitlines()[-1]
            answer = tokenizer.decode(probe.ids[begin:end])
            name = question.split(" came")[0].split(" worked")[0].split(" kept")[0]
            assert len([fact for fact in told if name in fact]) == 2
            assert [name in fact for fact in told if answer in fact] == [True]  # the others have other values
    with pytest.raises(UserError, match="do not fit into"):
        prose_facts(tokenizer, haystack, 400, 1)


def test_haystack_opens_at_ends_of_sentences(tokenizer: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    rng = random.Random(0)
    ids, spans = haystack.with_facts(rng, [1], [[7, 7], [8, 8]], 400)
    assert len(ids) == 400
    assert ids[0] == 1
    for (begin, end), fact in zip(spans, ([7, 7], [8, 8]), strict=True):
        assert ids[begin:end] == fact
        assert tokenizer.decode(ids[:begin]).endswith(".")
    with pytest.raises(UserError, match="do not fit"):
        haystack.with_facts(rng, [], [[7] * 10], 9)
    with pytest.raises(UserError, match="need a text of 99990 tokens"):
        haystack.with_facts(rng, [], [[7] * 10], 100000)


@torch.no_grad()
def test_outcomes_of_ragged_probes_do_not_depend_on_batches() -> None:
    model = tiny_teacher("llama")
    rng = random.Random(0)
    probes = []
    for length in (20, 90, 33, 21):
        ids = tuple(rng.randrange(3, 97) for _ in range(length))
        probes.append(Probe(ids, ((1, 3), (length - 6, length - 5), (length - 4, length))))
    together = answer_outcomes(model, probes)
    alone = [answer_outcomes(model, [probe]) for probe in probes]
    np.testing.assert_allclose(together.nats, np.concatenate([part.nats for part in alone]), rtol=1e-4)
    assert together.owners.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    log_probs = model(torch.tensor([probes[1].ids])).logits.double().log_softmax(-1)[0]
    expected = -sum(float(log_probs[place - 1, probes[1].ids[place]]) for place in range(86, 90))
    assert together.nats[5] == pytest.approx(expected, rel=1e-4)


def clusters(rows: list[list[float]]) -> Clusters:
    return Clusters(np.array([sum(row) for row in rows]), np.array([len(row) for row in rows]))


def test_relative_scores() -> None:
    teacher = clusters([[1, 1], [1, 1], [1, 0], [1, 1]])
    control = clusters([[0, 0], [1, 0], [0, 0], [0, 0]])
    half = clusters([[1, 0], [1, 1], [0, 0], [1, 0]])
    itself = relative_score(teacher, teacher, control)
    assert (itself.value, itself.stderr) == (1.0, 0.0)
    nothing = relative_score(control, teacher, control)
    assert (nothing.value, nothing.stderr) == (0.0, 0.0)
    score = relative_score(half, teacher, control)
    assert score.value == pytest.approx((4 / 8 - 1 / 8) / (7 / 8 - 1 / 8))
    weak = clusters([[1] + [0] * 9] * 4)
    assert relative_score(half, weak, clusters([[0] * 10] * 4)) is None  # a teacher of 10% cannot show it
    assert relative_score(half, teacher, teacher) is None
    empty = Clusters(np.zeros(4), np.zeros(4))
    assert math.isnan(empty.score.value)
    assert relative_score(empty, empty, empty) is None


def test_the_error_of_a_relative_score_is_that_of_the_ratio() -> None:
    """The delta method, of clusters of unequal sizes in which all three models find the same ones hard."""
    rng, count = np.random.default_rng(1), 1000
    sizes = rng.integers(1, 4, count)
    hard = rng.standard_normal(count)
    student, teacher, control = (
        sizes * (level + share * hard + 0.2 * rng.standard_normal(count))
        for level, share in ((0.5, 0.3), (0.8, 0.1), (0.2, 0.4))
    )
    score = relative_score(*(Clusters(sums, sizes) for sums in (student, teacher, control)))
    gained, known = student - control, teacher - control
    assert score.value == pytest.approx(gained.sum() / known.sum())
    expected = np.sqrt(count) * (gained - score.value * known).std(ddof=1) / known.sum()
    assert score.stderr == pytest.approx(expected, rel=0.05)  # 2,000 replicates give an error of 1.6%


def test_paired_differences_see_what_is_common() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    one, other = Clusters(hard + 0.1, np.ones(200)), Clusters(hard, np.ones(200))
    difference = paired_difference(one, other)
    assert difference.value == pytest.approx(0.1)
    assert difference.stderr < 1e-9
    assert one.score.stderr == pytest.approx(hard.std(ddof=1) / math.sqrt(200))
    noisy = paired_difference(Clusters(rng.random(200), np.ones(200)), other)
    assert noisy.stderr == pytest.approx(math.sqrt(2 / 12 / 200), rel=0.2)
    assert math.isnan(Clusters(np.array([1.0]), np.array([2])).score.stderr)


@torch.no_grad()
def test_token_measures_of_a_copy_of_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(0))
    vocabulary = tiny_teacher("llama").config.vocab_size
    found = token_measures(tiny_teacher("llama"), ids, 18, 2, vocabulary, tiny_teacher("llama"))
    assert found.divergences is not None
    assert np.abs(found.divergences).max() < 1e-5
    assert found.agreements.tolist() == [[1.0] * 18] * 3
    other = token_measures(Oracle(wrong=True), ids, 19, 2, VOCABULARY, Oracle()).agreements
    assert other.tolist() == [[0.0] * 19] * 3
    log_probs = tiny_teacher("llama")(ids).logits.log_softmax(-1)[:, 1:-1]
    np.testing.assert_allclose(found.losses, -log_probs.gather(-1, ids[:, 2:, None])[..., 0].numpy(), rtol=1e-4)
    assert found.hits.tolist() == (log_probs.argmax(-1) == ids[:, 2:]).float().tolist()
    monkeypatch.setattr(text_scores, "_LOGITS", 7 * 2 * vocabulary)
    in_parts = token_measures(tiny_teacher("llama"), ids, 18, 2, vocabulary, tiny_teacher("llama"))
    for name in ("losses", "hits", "divergences", "agreements"):
        np.testing.assert_allclose(getattr(in_parts, name), getattr(found, name), rtol=1e-4, atol=1e-5)
