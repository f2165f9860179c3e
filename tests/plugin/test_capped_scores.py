"""Models that cap softmax scores run eager attention: SDPA has no cap, and transformers before 5.21 leaves it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from deltanet_hf import converted_config
from deltanet_hf.loading import load_model
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from support.tiny_models import randomise, teacher_config, tiny_student, tiny_table

IDS = torch.arange(3, 40)[None]


def capped(kind: str) -> PreTrainedModel:
    """Gemma 2 whose scores the cap changes much; the student keeps softmax in layers 1 and 3."""
    config = teacher_config("gemma2", attn_logit_softcapping=0.01)
    if kind == "teacher":
        model = FAMILIES["gemma2"].model_class(config)
    else:
        model = model_class("gemma2")(converted_config(config, tiny_table(layers=(0, 2))))
    model.set_attn_implementation("eager")
    randomise(model, 0)
    return model.eval()


@pytest.mark.parametrize("kind", ["teacher", "student"])
@pytest.mark.parametrize("options", [{}, {"attn_implementation": "sdpa"}], ids=["default", "sdpa"])
def test_loading(tmp_path: Path, kind: str, options: dict[str, str]) -> None:
    model = capped(kind)
    model.save_pretrained(tmp_path)
    loaded = load_model("it", tmp_path, torch.float32, **options)
    assert loaded.config._attn_implementation == "eager"
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
        uncapped = load_model("it", tmp_path, torch.float32, attn_logit_softcapping=None)
        assert (uncapped(IDS).logits - model(IDS).logits).abs().max() > 1e-3


def test_a_converted_model_needs_no_option_of_transformers(tmp_path: Path) -> None:
    model = capped("student")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "eager"
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


def test_other_families_run_sdpa(tmp_path: Path) -> None:
    tiny_student("gemma3_text", layers=(0, 2)).save_pretrained(tmp_path)
    assert load_model("it", tmp_path, torch.float32).config._attn_implementation == "sdpa"
