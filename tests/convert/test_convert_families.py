"""Converts, checks, writes and loads every family, the profiles in turn, with all layers and as a hybrid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltanet_convert.calibration_text import CalibrationText, read_text, tokenise
from deltanet_convert.start import START, copy_weights
from deltanet_hf.errors import QualityError
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.models.families import FAMILIES
from support.tiny_conversion import teacher_folder, tiny_conversion, tiny_job, tiny_tokenizer
from support.tiny_models import LAYERS

pytestmark = pytest.mark.usefixtures("quick_fit")
FITTED = START["gated_deltanet"]
PROFILES = ("faithful", "qwen3_5")
CASES = {(family, PROFILES[number % 2], "all") for number, family in enumerate(FAMILIES)}
# Qwen2 in every combination, because an export needs norms in one of them; hybrids of some others.
CASES |= {("qwen2", profile, layers) for profile in PROFILES for layers in ("all", "every:2")}
CASES |= {("llama", "qwen3_5", "every:2"), ("phi3", "qwen3_5", "every:2"), ("gemma3_text", "faithful", "every:2")}


def held_out_check(teacher: Path, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """The figures of `compare_models`, computed in float64 from the complete models, as approximate numbers."""
    original = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        want, got = (
            torch.cat([one(row[None]).logits[0, :-1] for row in ids]).double().log_softmax(-1)
            for one in (original, model)
        )
    targets = ids[:, 1:].flatten()
    before, after = (float(F.nll_loss(one, targets).exp()) for one in (want, got))
    kl = float(F.kl_div(got, want, log_target=True, reduction="batchmean"))
    found = {"teacher_perplexity": before, "perplexity": after, "kl": kl}
    return {"tokens": len(targets)} | {name: pytest.approx(value, rel=1e-4) for name, value in found.items()}


@pytest.mark.parametrize(("family", "profile", "layers"), sorted(CASES))
def test_converted_model_is_what_was_measured(tmp_path: Path, family: str, profile: str, layers: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family)
    job = tiny_job(teacher, tmp_path / "out", profile=profile, layers=layers)
    report = tiny_conversion(teacher, tmp_path / "out", profile=profile, layers=layers)

    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    words = "Some 12 words, it's true."
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", teacher))
    assert ours(words)["input_ids"] == theirs(words)["input_ids"]
    converted = [i for i in range(LAYERS) if layers == "all" or i % 2 == 0]
    found = [i for i, layer in enumerate(model.model.layers) if isinstance(layer.self_attn, GatedDeltaNet)]
    assert found == converted == report["plan"]["converted_layers"]
    assert report["plan"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # Softmax attention with the converted layers' weights is the teacher's.
    assert [layer["index"] for layer in report["layers"]] == converted
    assert max(layer["softmax_error"] for layer in report["layers"]) < 1e-5
    # The figures computed layer by layer equal those of the complete models.
    assert report["held_out"] == held_out_check(teacher, model, texts_of(job).held_out)
    # Everything is the teacher's, except the converted attention and attention with inserted q/k norms. Of the tiny
    # families, only Qwen2 gets such norms: the others have them, or something else prevents an export.
    normed = [layer["index"] for layer in report["inserted_norms"]]
    assert normed == ([1, 3] if (family, profile, layers) == ("qwen2", "qwen3_5", "every:2") else [])
    before, after = AutoModelForCausalLM.from_pretrained(teacher).state_dict(), model.state_dict()
    mixers = tuple(f"model.layers.{i}.self_attn." for i in [*converted, *normed])
    for name, value in before.items():
        if not name.startswith(mixers):
            assert torch.equal(after[name], value), name


def texts_of(job: Any) -> CalibrationText:
    # AutoTokenizer uses its own class for some families; conversion and user get the same tokens.
    tokenizer = AutoTokenizer.from_pretrained(job.teacher.folder)
    tokens, seed = job.options.calibration_tokens, job.options.seed
    documents = read_text(job.options.text, 2 * tokens)
    return tokenise(documents, tokenizer, tokens, seed, "", job.plan.sequence_length)


WRONG = {
    "rows repeated": lambda rows, head_dim, times: rows.repeat_interleave(times, dim=0),
    "heads tiled": lambda rows, head_dim, times: torch.cat([rows] * times),
}


@pytest.mark.parametrize(
    ("family", "wrong"), [("llama", "rows repeated"), ("qwen2", "heads tiled"), ("phi3", "rows repeated")]
)
def test_wrong_head_mapping_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, wrong: str) -> None:
    monkeypatch.setattr(copy_weights, "expand_heads", WRONG[wrong])
    teacher = teacher_folder(tmp_path / "teacher", family)
    with pytest.raises(QualityError, match="layer 0: softmax attention"):
        tiny_conversion(teacher, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fitted_start_is_better_than_an_arbitrary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", num_hidden_layers=2)
    arbitrary = tiny_conversion(teacher, tmp_path / "arbitrary")
    monkeypatch.setitem(START, "gated_deltanet", FITTED)
    fitted = tiny_conversion(teacher, tmp_path / "fitted")
    for good, bad in zip(fitted["layers"], arbitrary["layers"], strict=True):
        assert good["relative_mse"] < 0.8 * bad["relative_mse"]


@pytest.mark.usefixtures("real_plot")
def test_output_folder_is_complete(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3")
    (teacher / "chat_template.jinja").write_text("{{ messages }}")
    (teacher / "LICENSE").write_text("terms")
    (teacher / "README.md").write_text("---\nlicense: apache-2.0\n---\n# teacher\n")
    report = tiny_conversion(teacher, tmp_path / "out", shard_size=60_000)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    wanted = "README.md LICENSE config.json generation_config.json tokenizer.json tokenizer_config.json conversion.json"
    wanted += " chat_template.jinja layer_errors.png deltanet_shim.py model.safetensors.index.json"
    assert names >= set(wanted.split())
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert not any(name.endswith(".tmp") for name in names)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == report
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\n")
    assert "license: apache-2.0" in card
    assert f"{report['held_out']['perplexity']:.2f}" in card
    assert (tmp_path / "out" / "layer_errors.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("Hello 1")["input_ids"] == tiny_tokenizer()("Hello 1")["input_ids"]
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_measured_in_the_dtype_that_is_stored(tmp_path: Path, dtype: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    job = tiny_job(teacher, tmp_path / "out", dtype=dtype)
    report = tiny_conversion(teacher, tmp_path / "out", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stored.dtype == getattr(torch, dtype)
    assert stored.model.layers[0].self_attn.decay.A_log.dtype == torch.float32
    assert report["held_out"] == held_out_check(teacher, model, texts_of(job).held_out)


def test_untied_output_head(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", tie_word_embeddings=False)
    report = tiny_conversion(teacher, tmp_path / "out")
    assert report["teacher"]["tied_embeddings"] is False
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
