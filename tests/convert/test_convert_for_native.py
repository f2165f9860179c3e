"""`convert --for native` refuses before any work what could not be exported; `convert` takes Qwen3.5 models in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltanet_convert import layer_step
from deltanet_convert.command import convert_command
from deltanet_convert.export.command import export_command
from deltanet_hf.cli import build_app
from deltanet_hf.errors import UserError
from tiny_conversion import quick_start, teacher_folder, text_file
from tiny_export import EVERY_OTHER, native_model, saved


@pytest.mark.parametrize(
    ("model_type", "layers", "message"),
    [("llama", "every:2", "kept layers"), ("gemma2", "all", "family"), ("llama", "all", "attention_bias")],
)
def test_what_could_not_be_exported_is_refused(model_type: str, layers: str, message: str, tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", model_type)  # the tiny Llama has biases
    with pytest.raises(UserError, match=f"--for native.*\n(.*\n)*.*{message}"):
        convert_command(str(teacher), tmp_path / "out", layers=layers, target="native")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def test_converted_for_native_can_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_step, "initialise_layer", quick_start)
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=2)
    text = text_file(tmp_path)
    with pytest.raises(UserError, match="--for"):
        convert_command(str(teacher), tmp_path / "out", target="vllm")
    convert_command(
        str(teacher), tmp_path / "out", layers="every:2", target="native", text=text, calibration_tokens=256
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["deltanet"]["profile"] == "native"
    export_command(str(tmp_path / "out"), tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["model_type"] == "qwen3_5_text"


def test_convert_takes_an_export_back(tmp_path: Path) -> None:
    source = saved(native_model("qwen3", EVERY_OTHER), tmp_path / "model")
    export_command(str(source), tmp_path / "export")
    arguments = ["convert", str(tmp_path / "export"), str(tmp_path / "back")]
    result = CliRunner().invoke(build_app("convert"), [*arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "deltanet_qwen3," in result.output
    assert not (tmp_path / "back").exists()
    assert CliRunner().invoke(build_app("convert"), arguments).exit_code == 0
    before, after = ((folder / "config.json").read_text() for folder in (source, tmp_path / "back"))
    assert json.loads(before) == json.loads(after)
    with pytest.raises(UserError, match="lies in"):
        convert_command(str(tmp_path / "export"), tmp_path / "export" / "inner")
