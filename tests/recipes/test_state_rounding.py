"""The cost of states in few bits: every setting is decoded, and only float32 states are without error.

`state_drift` decodes what the layers read, one text after another.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deltanet_hf.errors import UserError
from measuring.study import state_drift
from measuring.study.state_rounding import SETTINGS, layers_with_states, main, measure, use_states
from support.tiny_models import HYBRID, LAYERS, tiny_student, tiny_teacher


def test_only_float32_states_are_without_error() -> None:
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    student, teacher = tiny_student("llama", layers=HYBRID, window=3), tiny_teacher("llama", seed=1)
    divergences, errors = measure(student, teacher, ids, prompt=9)
    exact, *rounded = errors.mean((1, 2)).tolist()
    assert exact == 0
    assert all(1e-5 < error < 0.1 for error in rounded)
    with torch.inference_mode():
        logits = [model(ids).logits[:, 9:].log_softmax(-1) for model in (teacher, student)]
    expected = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).double()
    torch.testing.assert_close(divergences[0], expected, rtol=1e-3, atol=1e-3)


def test_the_table_has_a_row_per_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, model in {"student": tiny_student("llama"), "teacher": tiny_teacher("llama")}.items():
        model.save_pretrained(tmp_path / name)
    np.save(tmp_path / "tokens.npy", np.arange(3, 97, dtype=np.uint16))
    main(str(tmp_path / "student"), str(tmp_path / "teacher"), tmp_path / "tokens.npy", prompt=8, count=12, texts=2)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| {name}" for name in SETTINGS]
    assert [int(row[1].replace(",", "")) for row in rows[:2]] == [LAYERS * 4 * 8 * 8 * size for size in (4, 2)]


def test_texts_are_one_sequence_of_each_layer() -> None:
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    student = tiny_student("llama", window=3)
    layers = layers_with_states(student)
    whole = state_drift.sequences(student, layers, ids)
    for text in range(2):
        alone = state_drift.sequences(student, layers, ids[text : text + 1])
        torch.testing.assert_close(whole[1].v[:, 20 * text : 20 * (text + 1)], alone[1].v)
    use_states(student, "float32", 0)
    with torch.inference_mode():
        torch.testing.assert_close(state_drift.decoded(layers[1], whole[1]), layers[1].mix(whole[1])[0][0])


def test_the_drift_has_a_row_per_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_student("llama").save_pretrained(tmp_path / "student")
    np.save(tmp_path / "tokens.npy", np.arange(3, 97, dtype=np.uint16))
    state_drift.main(str(tmp_path / "student"), tmp_path / "tokens.npy", layers="0,2", texts=2, length=20)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| 0", "| 2"]
    assert all(len(row) == 1 + len(SETTINGS) for row in rows)
    with pytest.raises(UserError, match=r"\[9\] have no states"):
        state_drift.main(str(tmp_path / "student"), tmp_path / "tokens.npy", layers="0,9", texts=2, length=20)
