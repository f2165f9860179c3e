"""`deltanet-hf convert --context`: models that read further than their teacher."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from deltanet_convert.calibration_text import calibration_text
from deltanet_convert.options import ConvertOptions
from deltanet_convert.views.plan_view import print_plan
from deltanet_hf.errors import UserError
from support.refusals import assert_refused
from support.tiny_conversion import opened, teacher_folder, text_file, tiny_conversion, tiny_job

WINDOWS: dict[str, Any] = {"mixer": "window", "changes": ("window=16",), "layers": "keep:1", "context": "512"}
STATES: dict[str, Any] = {**WINDOWS, "mixer": "gated_deltanet+window", "changes": ("window=33",)}


@pytest.mark.parametrize(
    ("kinds", "positions"), [(WINDOWS, "yarn"), (WINDOWS, "nope"), (WINDOWS, "cut"), (STATES, "yarn")], ids=str
)
@torch.no_grad()
def test_what_is_measured_is_the_model_that_is_loaded(tmp_path: Path, kinds: dict[str, Any], positions: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    options = {**kinds, "positions": positions, "cache_bits": 16 if positions == "cut" else 4}
    report = tiny_conversion(teacher, tmp_path / "out", **options)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    reference: Any = AutoModelForCausalLM.from_pretrained(teacher).eval()
    assert (model.config.max_position_embeddings, reference.config.max_position_embeddings) == (512, 128)
    ids = calibration_text(opened(teacher), text_file(tmp_path), 256, 0, report["text"]["sequence_length"]).held_out
    wanted, got = (one(ids).logits[:, :-1].log_softmax(-1) for one in (reference, model))
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
    assert report["held_out"]["kl"] == pytest.approx(float(kl), rel=1e-3)
    assert kl > 1e-4
    assert report["plan"]["positions"] == {"kind": positions, "teacher": 128, "context": 512}
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "It reads 512 tokens, the teacher 128: full-attention heads have " in card
    assert ("the model has to be trained before use" in card) == (positions == "nope")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["deltanet"]["positions"]["kind"] == positions


def test_the_plan_says_how_far_both_read(tmp_path: Path) -> None:
    job = tiny_job(teacher_folder(tmp_path / "teacher", "llama"), tmp_path / "out", **WINDOWS)
    shown = io.StringIO()
    print_plan(job.plan, Console(file=shown, width=120))
    assert (
        "Reads 512 tokens, the teacher 128: full-attention heads have YaRN x 4, windows and states the teacher's"
        in shown.getvalue()
    )


def test_what_is_refused(tmp_path: Path) -> None:
    plain, scaled, sliding = (
        teacher_folder(tmp_path / name, family, **changes)
        for name, family, changes in (
            ("plain", "llama", {}),
            ("scaled", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
            ("sliding", "mistral", {}),
        )
    )

    def planned(teacher: Path, **options: Any) -> None:
        tiny_job(teacher, tmp_path / "out", **{**WINDOWS, **options})

    assert_refused(
        planned,
        [
            ({"teacher": plain, "context": "128"}, UserError, "--context 128: the teacher reads 128 tokens itself"),
            ({"teacher": plain, "context": "64"}, UserError, "--context 64: the teacher reads 128 tokens itself"),
            ({"teacher": plain, "context": "far"}, UserError, "--context: 'far' is no length in tokens"),
            ({"teacher": scaled}, UserError, "positions are linear, and only default ones can be extended"),
            ({"teacher": plain, "positions": "cut", "cache_bits": 4}, UserError, "cut distances need keys in 16"),
            ({"teacher": sliding}, UserError, "layer 0 of the teacher slides"),
            *(
                (
                    {"teacher": plain, "mixer": mixer, "changes": changes},
                    UserError,
                    "layer 0 is gated_deltanet, which reads no further .* take the default --mixer and --set",
                )
                for mixer, changes in (("gated_deltanet", ()), ("gated_deltanet+window", ("delayed=false",)))
            ),
        ],
    )
    with pytest.raises(UserError, match="--positions nope: changes nothing without --context"):
        ConvertOptions(positions="nope")
