"""Calibration text: no more of a file than is needed, two disjoint parts, clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from deltanet_convert.calibration_text import CHARS_PER_TOKEN, CalibrationText, read_text, sequence_length, tokenise
from deltanet_convert.job import prepare
from deltanet_convert.options import ConvertOptions
from deltanet_hf.errors import UserError
from support.tiny_conversion import tiny_tokenizer
from support.tiny_models import teacher_config


def test_a_corpus_is_not_read_to_its_end(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 10_000})
    (tmp_path / "a.jsonl").write_text("\n".join([line] * 300 + ["not JSON, and never reached"]))
    found = read_text(tmp_path / "a.jsonl", 10)
    assert sum(map(len, found)) == max(1_000_000, CHARS_PER_TOKEN * 10)


def test_a_missing_text_is_refused_before_the_teacher_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^--text {tmp_path}/missing.txt: no such file"):
        prepare(str(tmp_path / "no-teacher"), tmp_path / "out", ConvertOptions(text=tmp_path / "missing.txt"))


def numbered(count: int) -> list[str]:
    """A text in which no two blocks of 64 characters are equal."""
    return ["".join(f"{i:08d}" for i in range(count))]


def drawn(seed: int) -> CalibrationText:
    return tokenise(numbered(1000), tiny_tokenizer(), 256, seed, "text", 64)


def test_the_two_parts_are_disjoint_and_drawn_by_the_seed() -> None:
    one, same, other = drawn(0), drawn(0), drawn(1)
    assert one.calibration.shape == (4, 64)
    calibration = {tuple(row.tolist()) for row in one.calibration}
    held_out = {tuple(row.tolist()) for row in one.held_out}
    assert len(calibration) == 4
    assert not calibration & held_out
    assert torch.equal(one.calibration, same.calibration)
    assert torch.equal(one.held_out, same.held_out)
    assert not torch.equal(one.calibration, other.calibration)
    assert one.sha256 == other.sha256
    assert one.sha256 != tokenise(numbered(1001), tiny_tokenizer(), 256, 0, "text", 64).sha256


def test_held_out_text_comes_after_all_calibration_text() -> None:
    text = drawn(3)
    tokenizer = tiny_tokenizer()

    def first_numbers(rows: torch.Tensor) -> list[int]:
        return [int(tokenizer.decode(row[:8]).replace(" ", "")) for row in rows]

    assert max(first_numbers(text.calibration)) < min(first_numbers(text.held_out))


@pytest.mark.parametrize("length", [64, 512])
def test_sequences_are_no_longer_than_the_model_allows(length: int) -> None:
    text = tokenise(numbered(4000), tiny_tokenizer(), 1024, 0, "text", length)
    assert text.calibration.shape == (1024 // length, length)


def test_documents_end_with_the_end_token() -> None:
    text = tokenise(["a" * 63] * 12, tiny_tokenizer(), 64, 0, "text", 64)
    assert text.calibration[0, -1] == tiny_tokenizer().eos_token_id


def test_sequences_begin_with_the_token_that_the_tokenizer_puts_before_a_text() -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    text, plain = tokenise(numbered(1000), tokenizer, 256, 0, "text", 64), drawn(0)
    for rows in (text.calibration, text.held_out):
        assert rows.shape[1] == 64
        assert rows[:, 0].tolist() == [bos] * len(rows)
        assert bos not in rows[:, 1:]
    assert bos not in plain.calibration


@pytest.mark.parametrize(
    ("mixer", "positions", "length"),
    [
        ("gated_deltanet", 8192, 512),
        ("gated_deltanet+window", 8192, 2048),
        ("deltaproduct+window", 1024, 1024),
        ("window", 8192, 2048),
    ],
)
def test_rows_are_long_where_there_are_windows(mixer: str, positions: int, length: int) -> None:
    options, config = ConvertOptions(mixer=mixer), teacher_config("llama", max_position_embeddings=positions)
    assert sequence_length(options.table(4, (3,)), config) == length
    assert sequence_length(options.head_table(4, 2, {(0, 1), (1, 0), (1, 1)}), config) == length
