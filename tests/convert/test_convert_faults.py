"""Careless use of `convert`: one line before any work, and nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from deltanet_convert.calibration_text import tokenise
from deltanet_convert.conversion import convert
from deltanet_convert.convert_command import convert_command
from deltanet_convert.job import prepare, sole_conversion
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START
from deltanet_convert.storage.safetensors_folder import SINGLE_FILE
from deltanet_hf.errors import UserError
from deltanet_hf.loading import load_model
from support.tiny_conversion import (
    PLAIN,
    TOKENS,
    quick_start,
    teacher_folder,
    text_file,
    tiny_conversion,
    tiny_job,
    tiny_tokenizer,
)
from tests.convert.test_hostile_checkpoints import Change, edited


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_folder(tmp_path_factory.mktemp("good") / "teacher", "llama", num_hidden_layers=2)


@pytest.fixture
def teacher(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    text_file(tmp_path)
    return Path(shutil.copytree(good, tmp_path / "teacher"))


def updated(name: str, **keys: Any) -> Change:
    return edited(name, lambda values: values.update(keys))


def test_a_sliding_window_as_text_is_refused(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "mistral", "mistral", num_hidden_layers=1)
    updated("config.json", sliding_window="many")(teacher)
    with pytest.raises(UserError, match="sliding_window"):
        prepare(str(teacher), tmp_path / "out", ConvertOptions())


@pytest.mark.parametrize(
    ("keys", "said"), [({"model_max_length": "many"}, "cannot be loaded"), ({"x": "\udcff"}, "cannot be saved again")]
)
def test_a_damaged_tokenizer_is_refused_before_any_work(
    teacher: Path, tmp_path: Path, keys: dict[str, str], said: str
) -> None:
    updated("tokenizer_config.json", **keys)(teacher)
    job = tiny_job(teacher, tmp_path / "out")
    with pytest.raises(UserError, match=f"its tokenizer {said}"):
        convert(job, tmp_path / "out", lambda *args: None)
    assert not list(tmp_path.glob(".*"))


def test_a_target_that_cannot_be_made_is_refused(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    options = ConvertOptions(**PLAIN, text=tmp_path / "text.txt", calibration_tokens=TOKENS)
    before = sorted(tmp_path.iterdir())
    long = ["a" * 300, "a" * 250, "none/" + "a" * 300, "/".join(["b" * 200] * 30)]  # 250: the hidden folder has more
    for out in (*long, "text.txt/out", "loop/out", "\udcff", "/dev/null/out", "/proc/nothing/out"):
        with pytest.raises(UserError, match="choose another output") as caught, sole_conversion(tmp_path / out):
            convert(prepare(str(teacher), tmp_path / out, options), tmp_path / out, lambda *args: None)
        assert "\n" not in str(caught.value)
        assert sorted(tmp_path.iterdir()) == before


def test_devices_that_are_not_there_and_impossible_numbers_of_tokens_are_refused(teacher: Path, tmp_path: Path) -> None:
    for device in ("banana", "meta", "", "-1", "cuda:99", "mps"):
        with pytest.raises(UserError, match="--device"):
            prepare(str(teacher), tmp_path / "out", ConvertOptions(device=device))
    for tokens in (10**11, 10**30, 63):
        with pytest.raises(UserError, match=r"--calibration-tokens: got .* 1,000,000,000"):
            ConvertOptions(calibration_tokens=tokens)


@pytest.mark.parametrize(("text", "remedy"), [("a", "give more text"), ("word " * 40, "or use at most 100")])
def test_a_short_text_says_how_much_would_do(text: str, remedy: str) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(UserError, match=f"too few for --calibration-tokens 512 .*{remedy}$"):
        tokenise([text], tokenizer, 512, 0, "text.txt", 512)
    if remedy != "give more text":
        assert tokenise([text], tokenizer, 100, 0, "text.txt", 512).calibration.shape == (1, 100)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_of_its_own_is_kept_beside_tied_embeddings(teacher: Path, tmp_path: Path, same: bool) -> None:
    weights = load_file(teacher / SINGLE_FILE)
    assert "lm_head.weight" not in weights
    head = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = head if same else head.flip(0)
    save_file(weights, teacher / SINGLE_FILE, {"format": "pt"})
    tiny_conversion(teacher, tmp_path / "out")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert student.config.tie_word_embeddings is same
    assert torch.equal(student.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(teacher).lm_head.weight, weights["lm_head.weight"])


def test_the_record_leads_to_a_local_teacher(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    out = tmp_path / "deep" / "out"
    report = tiny_conversion(teacher, out, text=tmp_path / "text.txt")
    assert (out / report["teacher"]["folder"]).resolve() == teacher.resolve()
    assert str(tmp_path) not in json.dumps(report["teacher"])
    assert tiny_conversion(teacher, out, text=tmp_path / "text.txt", resume=True) == report


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_how_the_teacher_is_called_is_no_setting_of_the_student(family: str, tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family)
    other = Path(shutil.copytree(teacher, tmp_path / "other"))
    outputs = {f"output_{what}": True for what in ("attentions", "hidden_states", "router_logits")}
    updated("config.json", **outputs, return_dict=False)(other)
    updated("generation_config.json", cache_implementation="static", max_cache_len=64)(other)
    options: dict[str, Any] = {"mixer": "window", "layers": "every:2", "cache_bits": 4}
    held_out = [tiny_conversion(one, tmp_path / f"{one.name}-out", **options)["held_out"] for one in (teacher, other)]
    assert held_out[0] == held_out[1]
    ids, said = torch.arange(3, 15).view(1, 12), []
    for one in (teacher, other):
        model = load_model(one.name, tmp_path / f"{one.name}-out", "auto")
        said.append(model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).tolist())
    assert said[0] == said[1]
    assert load_model("other", other, "auto")(ids).logits.shape == (1, 12, 97)


def test_auto_has_nothing_to_choose_from_one_layer(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    teacher = teacher_folder(tmp_path / "teacher", "gemma3_text", layer_types=types)
    with pytest.raises(UserError, match=r"^--keep auto: teacher has one layer of full attention, .* --keep none"):
        convert_command(str(teacher), tmp_path / "out", dry_run=True, device="cpu")
    teacher = teacher_folder(tmp_path / "sliding", "gemma3_text", layer_types=["sliding_attention"] * 4)
    with pytest.raises(UserError, match=r"^--keep auto, 11%@2k: at 2048 tokens"):  # no option that nobody gave
        convert_command(str(teacher), tmp_path / "out", dry_run=True, device="cpu")
