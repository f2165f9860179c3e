"""The cost of states in few bits: every setting is decoded, and only float32 states are without error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from measuring.study.state_rounding import SETTINGS, main, measure
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
