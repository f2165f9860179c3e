"""Gates of DuoAttention: heads that matter keep theirs, and the choice is a selection that convert can read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from deltanet_convert.select.selection_file import read_selection
from deltanet_convert.select.units import Candidates
from deltanet_hf.errors import UserError
from measuring.study import duo_attention
from measuring.study.duo_attention import chosen_heads, passkey_row, train_gates
from support.tiny_models import tiny_teacher

TEXT = np.random.default_rng(0).integers(5, 60, 3000)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passkeys of one word, for a tokenizer of bytes, and a short window."""
    monkeypatch.setattr(duo_attention, "WORDS", 1)
    monkeypatch.setattr(duo_attention, "WINDOW", 8)
    monkeypatch.setattr(duo_attention, "SINKS", 2)
    monkeypatch.setattr(duo_attention, "RATE", 0.1)


def test_rows_ask_for_every_passkey(tokenizer: PreTrainedTokenizerFast) -> None:
    row, begin = passkey_row(tokenizer, TEXT, 1000, random.Random(0))
    assert len(row) == 1000
    told, asked = tokenizer.decode(row[:begin]), tokenizer.decode(row[begin:])
    questions = [line for line in asked.splitlines() if line]
    assert len(questions) == 10
    assert all(question in told for question in questions)
    with pytest.raises(UserError, match="rows of 100 tokens"):
        passkey_row(tokenizer, TEXT, 100, random.Random(0))


def test_a_head_without_effect_loses_its_gate(tokenizer: PreTrainedTokenizerFast) -> None:
    teacher = tiny_teacher("llama", vocab_size=340, max_position_embeddings=2048)
    with torch.no_grad():
        for layer in teacher.model.layers:  # query heads 2 and 3 read key/value head 1
            layer.self_attn.o_proj.weight[:, 16:] = 0
    gates = train_gates(teacher, tokenizer, TEXT, steps=12, longest=850)
    assert gates.shape == (4, 2)
    assert float(gates[:, 1].max()) < 0.1
    assert float(gates[:, 0].mean()) > float(gates[:, 1].mean()) + 0.2
    assert (gates.min() >= 0, gates.max() <= 1) == (True, True)


def test_the_largest_gates_are_kept() -> None:
    candidates = Candidates.of(tiny_teacher("llama").config, "kv_head")
    gates = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.2, 0.95], [0.0, 0.5]])
    assert chosen_heads(gates, candidates, 4) == [(2, 1), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(UserError, match="has 8 key/value heads"):
        chosen_heads(gates, candidates, 9)


def test_the_choice_is_a_selection(teacher_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", TEXT.astype(np.uint16))
    duo_attention.main(str(teacher_folder), tmp_path / "text.npy", tmp_path / "duo.json", 3, 1, 850, 0)
    selection = read_selection(tmp_path / "duo.json")
    assert len(selection.heads) == 3
    assert (selection.method, selection.unit) == ("duo_attention", "kv_head")
