"""The demo's measurements on models whose figures are known, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltanet_hf.errors import UserError
from deltanet_hf.models.cache_bits import cache_bits_of, stored_bytes
from deltanet_recipes.demo import measure as demo
from support.tiny_run import WORDS, make_models

STATE = {"window": 12, "expand_kv": False, "state_dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_models(tmp_path, layers=(0, 2), **STATE)
    # The tiny tokenizer knows none of the shipped words, and a window changes nothing where all tokens are one.
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * i % WORDS}" for i in range(400)))
    monkeypatch.setattr(demo, "shipped_texts", lambda: [text])
    for name, value in {"LENGTH": 128, "BLOCK": 16, "PASSAGE": 16, "BETWEEN": 32, "PART": 8}.items():
        monkeypatch.setattr(demo, name, value)
    return tmp_path


def test_the_demo_compares_equal_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    students = {"student": folder / "student"}
    measure = demo.DemoMeasure(folder / "teacher", students, folder / "measured.jsonl", print)
    student = measure.student("student")
    assert demo.softmax_layers(folder / "student") == [1]
    teacher, packed, everywhere, spread, chosen = measure.baselines([1], student.megabytes[0])
    assert teacher.kl == (0.0, 0.0) != packed.kl
    assert cache_bits_of(measure.teacher) == 16
    for row, bits in ((teacher, 16), (packed, 4)):
        sizes = [stored_bytes(measure.teacher.bfloat16(), tokens, bits) / 1e6 for tokens in (demo.LENGTH, demo.FAR)]
        assert list(row.megabytes) == sizes
    assert spread.name != chosen.name != everywhere.name
    for policy in (everywhere, spread, chosen):
        assert policy.name.startswith("untrained: window of ")
        assert policy.megabytes[0] <= student.megabytes[0]
        assert policy.kl[0] > 1e-3
    again = demo.DemoMeasure(folder / "teacher", students, folder / "measured.jsonl", print)
    monkeypatch.setattr(demo, "_load", lambda folder: pytest.fail("a row that is there is measured again"))
    assert again.student("student") == student
    monkeypatch.undo()
    (folder / "student" / "config.json").touch()
    with pytest.raises(UserError, match=r"measured.jsonl: holds measurements with another student\.config\.json"):
        demo.DemoMeasure(folder / "teacher", students, folder / "measured.jsonl", print)


def test_a_copy_of_the_teacher_has_no_divergence(folder: Path) -> None:
    measure = demo.DemoMeasure(folder / "teacher", {"copy": folder / "teacher"}, folder / "measured.jsonl", print)
    copy = measure.student("copy")
    assert copy.kl[0] == pytest.approx(0.0, abs=1e-6)
    assert copy.repeat == measure.baselines([1], copy.megabytes[0])[0].repeat
