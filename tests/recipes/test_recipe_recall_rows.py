"""Synthetic recall rows: complete facts and answers, nothing of the evaluation, the same rows after a resume."""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltanet_hf.errors import UserError
from deltanet_recipes.data.packing import Mixture, Stream, split_streams
from deltanet_recipes.data.recall_formats import FORMATS, Words
from deltanet_recipes.data.recall_rows import RecallRows, RecallStream
from deltanet_recipes.data.tokens import Corpus
from deltanet_recipes.schema_sections import Source
from deltanet_recipes.training.pipeline import run
from support.refusals import assert_refused
from support.tiny_run import DISTIL, interrupted_at, losses, tiny_recipe

EOS = 2


def byte_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """Every byte is a token, so that a decoded row shows exactly what was written; further tokens are `words`."""
    symbols = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{w}" for w in words)]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")


TOKENIZER = byte_tokenizer()
TEXT = "The lamps along the quay went out one by one, and a late boat came up the river. "


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def stream(seed: int = 0, weight: float = 0.05, documents: int = 30, **recall: Any) -> tuple[Stream, RecallStream]:
    pieces = [[1, *ids_of(TEXT * 3), EOS] for _ in range(documents)]
    starts = np.cumsum([0, *(len(piece) for piece in pieces)])
    corpus = Corpus("text", 1.0, np.concatenate([np.array(piece) for piece in pieces]), None, starts, {})
    ((text,), _) = split_streams([corpus], 0, seed, True)
    return text, RecallStream(Source(recall=recall, weight=weight), TOKENIZER, [text], [EOS, 1], seed)


@pytest.mark.parametrize("length", [1024, 200])
@pytest.mark.parametrize("name", FORMATS)
def test_every_answer_was_told_before_the_questions(name: str, length: int) -> None:
    rows, text = RecallRows(TOKENIZER, 12), ids_of(TEXT * 60)
    counts = []
    for number in range(20):
        rng = random.Random(f"{name} {number}")
        ids, answers = rows.make(rng, name, text[: length + number], length + number)
        assert len(ids) == length + number
        counts.append(len(answers))
        if not answers:
            continue
        first = min(place.start for place in answers)
        told = TOKENIZER.decode(ids[:first])
        for place in answers:
            assert 0 < place.start < place.stop <= len(ids)
            assert TOKENIZER.decode(ids[place]).strip() in told
        assert sum(place.stop - place.start for place in answers) < 0.7 * length
    assert max(counts) >= (1 if length == 200 else 2)


def test_facts_differ_in_their_keys_and_grow_with_the_row() -> None:
    rows, text = RecallRows(TOKENIZER, 12), ids_of(TEXT * 60)
    counts = {length: 0 for length in (512, 4096)}
    for length in counts:
        for number in range(20):
            _, answers = rows.make(random.Random(number), "json", text[:length], length)
            counts[length] = max(counts[length], len(answers))
    assert 3 <= counts[512] <= 6
    assert 12 < counts[4096] <= 48


def test_half_the_text_stays_text() -> None:
    _, recall = stream(formats=["lines"])
    rows = [recall.read(number * 512, 513)[0] for number in range(20)]
    decoded = [TOKENIZER.decode(row) for row in rows]
    assert all(len(re.sub(r"[^a-z ]", "", text)) > 150 for text in decoded)
    assert sum("late boat" in text for text in decoded) > 15
    assert all(EOS not in row and 1 not in row for row in rows)


def test_rows_depend_on_seed_place_and_length_alone() -> None:
    _, recall = stream()
    first = recall.read(1024, 513)[0]
    recall.read(0, 257)
    _, again = stream()
    np.testing.assert_array_equal(again.read(1024, 513)[0], first)
    _, other = stream(seed=1)
    for different in (other.read(1024, 513)[0], recall.read(1536, 513)[0]):
        assert not np.array_equal(different, first)


def test_the_mixture_draws_its_share_and_repeats_it() -> None:
    def mixture() -> Mixture:
        text, recall = stream(weight=0.25)
        return Mixture([text, recall], EOS, True, True, 1)

    whole = mixture()
    rows = whole.take(50, 128)
    assert whole.state == [128 * 40, 128 * 10]
    halves = mixture()
    halves.take(20, 128)
    resumed = mixture()
    resumed.state = list(halves.state)
    np.testing.assert_array_equal(resumed.take(30, 128).input_ids, rows.input_ids[20:])
    assert (rows.input_ids[:, 0] == 1).all()  # begin-of-text, also in recall rows


def test_nothing_of_the_evaluation_is_trained() -> None:
    words = [f"{a}{b}{c}ing".capitalize() for a in "bcdfgh" for b in "aeiou" for c in "lmnprst"]
    titled = byte_tokenizer(*words)
    assert len(Words(titled).titles) == len(words)
    for tokenizer in (TOKENIZER, titled):
        made = Words(tokenizer)
        rng = random.Random(0)
        for _ in range(500):
            key, value = made.key(rng), made.value(rng)
            assert not re.fullmatch(r"[a-z]+", key)  # pairs of the evaluation are bare lower-case words
            assert not re.fullmatch(r"[a-z]+|\d{6}", value)
    for name, layout in FORMATS.items():
        for number in range(50):
            made_of = layout(random.Random(number))
            line = made_of.before + "KEY" + made_of.between + "VALUE" + made_of.after
            assert "secret code" not in line
            assert line.strip() != "KEY VALUE"
            assert name == "repeat" or "KEY VALUE" not in line


def test_a_text_of_separators_alone_is_one_clear_error() -> None:
    corpus = Corpus("ends", 1.0, np.full(50, EOS), None, np.arange(51), {})
    ((text,), _) = split_streams([corpus], 0, 0, False)
    with pytest.raises(UserError, match=r"^data: ends has too little text between its separators"):
        RecallStream(Source(recall={}), TOKENIZER, [text], [EOS], 0).read(0, 65)


def recipe(workplace: Path, out: Path, sources: list[dict[str, Any]], **stage: Any) -> Any:
    return tiny_recipe(workplace, out / "run", {**DISTIL, **stage}, data={"sources": sources})


def test_an_interrupted_run_continues_with_the_same_rows(workplace: Path, tmp_path: Path) -> None:
    sources = [{"path": str(workplace / "text.jsonl")}, {"recall": {"facts": 40}, "weight": 0.5}]
    final = run(recipe(workplace, tmp_path / "a", sources))
    card = (final / "README.md").read_text()
    assert "- synthetic recall rows (lines, list, json, table, tags, repeat), weight 0.5" in card
    broken = recipe(workplace, tmp_path / "b", sources)
    with interrupted_at(7):
        run(broken)
    run(broken)
    run(recipe(workplace, tmp_path / "c", sources[:1]))
    first, second, plain = (losses(tmp_path / name / "run") for name in "abc")
    assert first == second
    assert first != plain


def test_contradictions_are_refused(workplace: Path, tmp_path: Path) -> None:
    rows: list[tuple[list[dict[str, Any]], str]] = [
        ([{"recall": {}}], "recall rows take their text from the other sources"),
        ([{"recall": {}, "path": "text.jsonl"}], "exactly one of path"),
        ([{"recall": {"formats": []}}], "formats"),
        ([{"recall": {"formats": ["verse"]}}], "formats"),
        ([{"recall": {"facts": 0}}], "facts"),
        ([{"recall": None}], "exactly one of path"),
    ]
    read = functools.partial(recipe, workplace, tmp_path)
    assert_refused(read, [({"sources": sources}, UserError, said) for sources, said in rows])
