"""The measurement of how far models read: its probes, its nats and its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from deltanet_convert import output_files
from deltanet_hf.errors import UserError
from measuring.study import context
from measuring.study.far_needles import FILLER, KINDS
from support.tiny_conversion import teacher_folder, tiny_conversion, tiny_tokenizer

SCORED = 64


@pytest.fixture
def novels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of random letters and ends of sentences, and sizes for a tiny model."""
    for name, value in {"SCORED": SCORED, "TEXTS": 1, "PROBES": 1}.items():
        monkeypatch.setattr(context, name, value)
    letters = np.random.default_rng(0).choice(list("abcdefgh ."), 2000)
    np.save(tmp_path / "novels.npy", np.asarray(tiny_tokenizer()("".join(letters))["input_ids"], dtype=np.uint16))
    return tmp_path / "novels.npy"


def test_needles_have_one_answer_among_their_facts(novels: Path) -> None:
    tokenizer, text = tiny_tokenizer(), np.load(novels)
    for name, kind in KINDS.items():
        probes = kind.probes(tokenizer, text, 512, 3)
        assert [len(probe.ids) for probe in probes] == [512] * 3
        assert probes == kind.probes(tokenizer, text, 512, 3)
        for probe in probes:
            ((begin, end),) = probe.answers
            answer = tokenizer.decode(probe.ids[begin:end]).replace(" ", "")
            facts = [tokenizer.decode(probe.ids[slice(*fact)]).replace(" ", "") for fact in probe.facts]
            assert end == 512
            assert answer.isdigit()
            assert len(answer) == 7
            assert (len(facts), sum(answer in fact for fact in facts)) == (4 if name == "multikey_1" else 1, 1)
        filler = tokenizer(FILLER, add_special_tokens=False)["input_ids"]
        assert (set(probes[0].ids[:40]) <= set(filler)) == (name == "single_1")


@pytest.mark.slow
@torch.no_grad()
def test_a_row_for_the_teacher_and_for_every_kind_of_positions(
    tmp_path: Path, novels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "layer_error_plot", lambda layers, path: path.write_bytes(b""))
    teacher, out = teacher_folder(tmp_path / "teacher", "llama", max_position_embeddings=256), tmp_path / "rows.json"
    converted = tmp_path / "converted"
    tiny_conversion(
        teacher, converted, layers=None, keep="every:2", mixer="gated_deltanet+window", cache_bits=4, context="1536"
    )
    context.main(str(teacher), converted, novels, out, [f"trained={teacher}"], limit=2)
    head = json.loads(out.read_text())
    rows = {row.pop("model"): row for row in head["rows"]}
    assert list(rows) == [
        "teacher", "teacher, YaRN", "converted, as it is", "converted, yarn", "converted, nope",
        "converted, cut", "trained"
    ]  # fmt: skip
    assert head["command"].endswith("context teacher converted novels.npy rows.json --limit 2 --model=trained=FOLDER")
    assert rows["trained"] == rows["teacher"]
    assert len({row["nats_1536"] for row in rows.values()}) == 6
    assert rows["converted, yarn"]["MB_1536"] < rows["teacher"]["MB_1536"]
    model: Any = AutoModelForCausalLM.from_pretrained(teacher).eval()
    ids = torch.from_numpy(np.load(novels).astype(np.int64))
    texts = torch.stack([ids[end - 384 : end] for end in (1536, 2000)])
    labels = texts.clone().index_fill_(1, torch.arange(384 - SCORED), -100)
    nats = float(model(texts, labels=labels).loss)
    assert rows["teacher"]["nats_384"] == pytest.approx(nats, abs=1e-4)


def test_a_short_text_is_refused(novels: Path) -> None:
    with pytest.raises(UserError, match="novels: got 500 tokens, a text takes 512"):
        context.far_settings(tiny_tokenizer(), np.load(novels)[:500], 512)
