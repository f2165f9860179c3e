"""The starts of Mesa, test-time training and Titans' memory: fitted through their own rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltanet_hf.mixers.inner_training.mesa import MesaRidge
from deltanet_hf.mixers.inner_training.titans import START_LOGIT
from deltanet_hf.mixers.inner_training.ttt import InnerLayerNorm
from support.tiny_conversion import teacher_folder, tiny_conversion

STARTS = {
    "mesa": ("mesa_ridge.ridge", MesaRidge(4, 16).ridge),
    "ttt": ("inner_norm.first", InnerLayerNorm(4, 16).first),
    "titans": ("m_proj.bias", torch.full((4,), START_LOGIT)),
}


@pytest.mark.usefixtures("short_fit")
@pytest.mark.parametrize("mixer", STARTS)
def test_the_rule_is_fitted_with_its_own_parameters(tmp_path: Path, mixer: str) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=1)
    changes = ("inner_norm=true",) if mixer == "ttt" else ()
    report = tiny_conversion(teacher, tmp_path / "out", mixer=mixer, layers="all", changes=changes)
    (layer,) = report["layers"]
    assert layer["fit_mse"] < min(1.0, layer["search_mse"])
    name, start = STARTS[mixer]
    fitted = load_file(tmp_path / "out" / "model.safetensors")[f"model.layers.0.self_attn.{name}"].float()
    change = (fitted - start.detach()).abs().max()
    assert 0 < change < 0.5
