"""Perplexity, KL divergence, recall, errors and averages equal values that are computed in another way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Settings, Text, measure, repeated
from deltanet_hf.evaluation.measures.probes import Probe, answer_outcomes
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.report.teacher_share import percent_of_teacher
from deltanet_hf.evaluation.tasks.harness import TaskResult
from deltanet_hf.evaluation.tasks.recall_tasks import associative_recall
from deltanet_hf.evaluation.tasks.suites import SuiteTask, draw_rows
from deltanet_hf.evaluation.tasks.text_windows import token_ids, wikitext_texts, windows
from support.tiny_models import tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (5, 32), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_perplexity_and_divergence() -> None:
    teacher, student = tiny_teacher("llama"), tiny_student("llama")
    settings = Settings({"text": Text(IDS)}, teacher)
    found = measure(student, settings).clusters
    perplexity, kl, agreement = found["loss_text"].perplexity, found["kl_text"].score, found["top1_text"].score
    log_q = student(IDS).logits[:, :-1].double().log_softmax(-1)
    log_p = teacher(IDS).logits[:, :-1].double().log_softmax(-1)
    losses = -log_q.gather(-1, IDS[:, 1:, None]).mean(dim=(1, 2))
    assert perplexity.value == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    assert perplexity.stderr == pytest.approx(math.exp(losses.mean()) * float(losses.std()) / math.sqrt(5), rel=1e-3)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean(1)
    assert kl.value == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert kl.stderr == pytest.approx(float(divergence.std()) / math.sqrt(5), rel=1e-3)
    assert agreement.value == pytest.approx(float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean()))
    itself = measure(teacher, settings).clusters
    assert (itself["kl_text"].mean, itself["top1_text"].mean) == (0, 1)
    assert itself["loss_text"].mean == measure(teacher, Settings({"text": Text(IDS)})).clusters["loss_text"].mean


@torch.no_grad()
def test_parts_and_ends_of_texts() -> None:
    """The last 9 of 31 tokens, in items of 4, 4 and 1; every third of these in a part that two texts have."""
    teacher, student = tiny_teacher("llama"), tiny_student("llama")
    where = np.tile(np.arange(9) % 3 == 0, (5, 1))
    texts = {"a": Text(IDS, 9, 4, {"third": where}), "b": Text(IDS, 9, compared=False, parts={"third": where})}
    found = measure(student, Settings(texts, teacher)).clusters
    log_q, log_p = (model(IDS).logits[:, -10:-1].log_softmax(-1) for model in (student, teacher))
    losses = -log_q.gather(-1, IDS[:, -9:, None]).squeeze(-1)
    sums = torch.stack([losses[:, :4].sum(1), losses[:, 4:8].sum(1), losses[:, 8]], dim=1).flatten()
    np.testing.assert_allclose(found["loss_a"].sums, sums, rtol=1e-4)
    assert found["loss_a"].sizes.tolist() == [4, 4, 1] * 5
    hits = (log_q.argmax(-1) == IDS[:, -9:])[:, ::3].sum(1).tolist()
    assert (found["third"].sums.tolist(), found["third"].sizes.tolist()) == (hits * 2, [3] * 10)
    divergences = (log_p.exp() * (log_p - log_q)).sum(-1)[:, ::3].sum(1)
    np.testing.assert_allclose(found["third_kl"].sums, divergences, rtol=1e-3)
    assert "kl_b" not in found


@torch.no_grad()
def test_repeat_scores_the_second_copy_only() -> None:
    model = tiny_teacher("llama")
    twice = torch.cat([IDS, IDS], dim=1)
    log_q = model(twice).logits[:, :-1].double().log_softmax(-1).gather(-1, twice[:, 1:, None])[:, 31:]
    assert log_q.shape[1] == 32
    found = measure(model, Settings({"repeat": repeated(IDS)}, teacher=model)).clusters
    assert found["loss_repeat"].perplexity.value == pytest.approx(math.exp(-log_q.mean()), rel=1e-4)
    assert "kl_repeat" not in found


@torch.no_grad()
def test_probes_count_what_greedy_decoding_gives() -> None:
    """Probes whose answers are the model's greedy continuation are correct; changed ones are not."""
    model = tiny_teacher("llama")
    right = model.generate(IDS[:1], max_new_tokens=3, do_sample=False, eos_token_id=None)[0].tolist()
    wrong = [*right[:-1], (right[-1] + 1) % 97]
    short = model.generate(IDS[1:2, :20], max_new_tokens=2, do_sample=False, eos_token_id=None)[0].tolist()
    probes = [
        Probe(tuple(right), ((32, 35),)),
        Probe(tuple(wrong), ((32, 35), (32, 34))),
        Probe(tuple(short), ((20, 22),)),
    ]
    found = answer_outcomes(model, probes)
    assert found.exact.tolist() == [True, False, True, True]
    assert found.owners.tolist() == [0, 1, 1, 2]
    figures = measure(model, Settings(probes={"p": probes})).clusters
    assert [figures[name].sums.tolist() for name in ("p", "p.first")] == [[1, 1, 1], [1, 2, 1]]


def test_the_control_has_the_questions_without_the_facts() -> None:
    told = Probe(tuple(range(10)), ((8, 10),), ((3, 5),))
    wanted = Probe((0, 1, 2, 5, 6, 7, 8, 9), ((6, 8),))
    assert Settings(probes={"p": [told]}).without_facts().probes == {"p": [wanted]}


def test_associative_recall_asks_every_key_once(tokenizer: PreTrainedTokenizerFast) -> None:
    probes = associative_recall(tokenizer, pairs=8, count=3)
    assert probes == associative_recall(tokenizer, pairs=8, count=3)
    assert probes[0] != probes[1]
    for probe in probes:
        facts = {probe.ids[i]: probe.ids[i + 1] for i in range(0, 24, 3)}
        assert len({*facts, *facts.values()}) == 16
        assert len(probe.answers) == 8
        for begin, end in probe.answers:
            assert end == begin + 1
            assert begin > 24
            assert facts[probe.ids[begin - 1]] == probe.ids[begin]
    with pytest.raises(UserError, match="100 pairs need 200"):
        associative_recall(tokenizer, pairs=100)


def test_associative_recall_with_a_vocabulary_that_has_gaps() -> None:
    words = {f"▁{a}{b}word": 2 * i + 1 for i, (a, b) in enumerate((a, b) for a in "abcdef" for b in "abcdef")}
    backend = Tokenizer(WordLevel({"<unk>": 0, "\n": 2, **words}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert None in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    (probe,) = associative_recall(tokenizer, pairs=4, count=1)
    assert len(probe.answers) == 4


def test_errors_of_means() -> None:
    samples = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    plain = Clusters.each(samples).score
    assert plain.stderr == pytest.approx(np.std(samples, ddof=1) / math.sqrt(8))
    assert Clusters.of(samples, range(8)).score.stderr == pytest.approx(plain.stderr)
    doubled = Clusters.of(np.repeat(samples, 2), np.repeat(range(8), 2)).score  # copies add no information
    assert (doubled.value, doubled.items) == (plain.value, 8)
    assert doubled.stderr == pytest.approx(plain.stderr)
    assert Clusters.each([0.5]).score.to_dict() == {"value": 0.5, "stderr": None, "items": 1}
    assert Clusters.of([0.0, 1.0], [7, 7]).score.to_dict() == {"value": 0.5, "stderr": None, "items": 1}
    assert Clusters.each([1.0, 3.0]).perplexity.value == pytest.approx(math.exp(2))


def _result(samples: list[float]) -> TaskResult:
    return TaskResult(np.asarray(samples), {})


def test_percent_of_teacher() -> None:
    tasks = [SuiteTask("a", "acc", 0.5), SuiteTask("b", "acc", 0.0), SuiteTask("c", "acc", 0.25, averaged=False)]
    teacher = {"a": _result([1] * 9 + [0]), "b": _result([1] * 8 + [0] * 2), "c": _result([1] * 10)}
    student = {"a": _result([1] * 7 + [0] * 3), "b": _result([1] * 4 + [0] * 6), "c": _result([0] * 10)}
    score = percent_of_teacher(student, teacher, tasks)
    assert score.value == pytest.approx(100 * ((0.7 - 0.5) / (0.9 - 0.5) + 0.4 / 0.8) / 2)
    assert score.stderr > 0
    itself = percent_of_teacher(teacher, teacher, tasks)
    assert (itself.value, itself.stderr) == (100, 0)
    guessing = {**teacher, "a": _result([1, 0] * 5)}
    without = percent_of_teacher(student, guessing, tasks)
    assert (without.value, without.items) == (pytest.approx(50), 1)


def test_drawn_rows_are_fixed_and_inside() -> None:
    assert draw_rows("piqa", 10, None) == list(range(10))
    drawn = draw_rows("piqa", 1000, 50)
    assert drawn == draw_rows("piqa", 1000, 50) == sorted(set(drawn))
    assert drawn != draw_rows("sciq", 1000, 50)


def test_texts(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n')
    expected = [*tokenizer("ab")["input_ids"], 2, *tokenizer("cd")["input_ids"]]
    ids = token_ids(tmp_path / "a.jsonl", tokenizer, 2, 9)
    assert ids.tolist() == expected
    assert token_ids(tmp_path / "a.jsonl", tokenizer, 1, 1).tolist() == expected[:2]
    assert windows(ids, 2, 9).tolist() == [expected[:2], expected[2:4]]
    np.save(tmp_path / "b.npy", np.arange(10, dtype=np.uint16))
    assert token_ids(tmp_path / "b.npy", tokenizer, 5, 5).tolist() == list(range(10))
    with pytest.raises(UserError, match="5 tokens, but 6 are needed"):
        token_ids(tmp_path / "a.jsonl", tokenizer, 6, 9)
    (tmp_path / "c.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(UserError, match="line 1 has no string under key 'text'"):
        token_ids(tmp_path / "c.jsonl", tokenizer, 1, 1)
    np.save(tmp_path / "d.npy", np.array([9999]))
    with pytest.raises(UserError, match="token ids below"):
        token_ids(tmp_path / "d.npy", tokenizer, 1, 1)


def test_wikitext_in_two_formats(tmp_path: Path) -> None:
    assert wikitext_texts(tmp_path) == {}
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.tokens").write_text(" A well @-@ known cat , it sat . \n")
    texts = wikitext_texts(tmp_path)
    assert texts["wikitext2"] == " A well @-@ known cat , it sat . \n"
    assert texts["wikitext2_clean"].startswith(" A well-known cat, it sat.")
