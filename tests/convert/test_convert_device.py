"""Conversions fit their layers on the chosen device; the model and the working files are the same on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START
from support.tiny_conversion import teacher_folder, tiny_conversion

LEFT_OUT = ("window", "mixed_heads")  # nothing is fitted; come of a selection


def test_the_device_does_not_decide_what_an_interrupted_conversion_makes() -> None:
    assert ConvertOptions(device="cpu").decisive() == ConvertOptions().decisive()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mixer", "family"),
    [
        ("gated_deltanet+window", "llama"),
        ("gated_deltanet+window", "gemma3_text"),
        ("gated_deltanet", "gemma3_text"),
        *((name, "llama") for name in START if name not in LEFT_OUT),
    ],
)
def test_a_gpu_fits_as_well_as_the_cpu(tmp_path: Path, family: str, mixer: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family)
    found = {
        device: tiny_conversion(teacher, tmp_path / device, device=device, mixer=mixer, layers="every:2")
        for device in ("cpu", "cuda")
    }
    cpu, cuda = (report["layers"] for report in found.values())
    for there, here in zip(cuda, cpu, strict=True):
        if "relative_mse" in here:  # a fit of few steps; from equal starts, rounding leads to other ends
            assert there["relative_mse"] < 1.1 * here["relative_mse"] + 1e-3
        assert there.get("softmax_error", 0.0) < 1e-5
