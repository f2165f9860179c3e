"""Conversions for export are refused before any work if the result could not be exported; Qwen3.5 is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from typer.testing import CliRunner

from deltanet_convert.convert_command import convert_command
from deltanet_convert.export.export_command import export_command
from deltanet_convert.export.import_command import import_command
from deltanet_hf.errors import UserError
from deltanet_recipes.cli import build_app
from support.float64 import assert_same_function
from support.tiny_conversion import teacher_folder, text_file
from support.tiny_export import EVERY_OTHER, ROTARY, exportable_model, saved

pytestmark = pytest.mark.usefixtures("quick_fit")
HYBRIDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "head_dim": 16},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize(
    ("model_type", "layers", "message"), [("smollm3", "every:2", "kept layers"), ("gemma2", "all", "family")]
)
def test_what_could_not_be_exported_is_refused(model_type: str, layers: str, message: str, tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", model_type)
    with pytest.raises(UserError, match=f"--profile qwen3_5.*\n(.*\n)*.*{message}"):
        convert_command(str(teacher), tmp_path / "out", layers=layers, profile="qwen3_5")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize(("model_type", "dtype"), zip(HYBRIDS, ("float32", "bfloat16", "bfloat16"), strict=True))
def test_hybrids_without_norms_get_them(
    model_type: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = teacher_folder(tmp_path / "teacher", model_type, **HYBRIDS[model_type])
    options: dict[str, Any] = {"text": text_file(tmp_path), "calibration_tokens": 256, "dtype": dtype}
    convert_command(str(teacher), tmp_path / "out", layers="every:2", profile="qwen3_5", **options)
    printed = " ".join(capsys.readouterr().out.split())
    assert "close to the teacher's, not equal" in printed
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "deltanet_qwen3"
    assert config["inserted_qk_norms"] == [1, 3]
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["teacher"]["model_type"] == model_type
    assert [layer["index"] for layer in report["layers"]] == [0, 2]
    assert [layer["index"] for layer in report["inserted_norms"]] == [1, 3]
    for layer in report["inserted_norms"]:
        assert layer["attention_kl"] > 0
        assert layer["relative_mse"] > 0
    assert "RMSNorm on q and k" in (tmp_path / "out" / "README.md").read_text()

    export_command(str(tmp_path / "out"), tmp_path / "export")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    theirs = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    ids = torch.randint(3, 65, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(ours.generate(ids, **greedy), theirs.generate(ids, **greedy))
        assert_same_function(ours, theirs, ids)
    import_command(str(tmp_path / "export"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "back"))
    assert all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


def test_scaled_rotary_embeddings_are_for_some_runtimes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With Llama 3's rotary embedding, the conversion prints the formats that will not be possible."""
    teacher = teacher_folder(tmp_path / "teacher", "llama", **HYBRIDS["llama"], rope_parameters=ROTARY["llama3"])
    convert_command(str(teacher), tmp_path / "out", layers="every:2", profile="qwen3_5", dry_run=True)
    assert "Not for gguf: rope_parameters" in " ".join(capsys.readouterr().out.split())
    convert_command(str(teacher), tmp_path / "out", layers="every:2", profile="qwen3_5", dry_run=True, as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert [layer["normed"] for layer in plan["layers"]] == [False, True, False, True]  # for the other formats


def test_uneven_layers_are_said_to_cost_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=4)
    convert_command(str(teacher), tmp_path / "out", layers="keep:0,1", profile="qwen3_5", dry_run=True)
    assert "get 3 idle layers of zeros among the 4" in " ".join(capsys.readouterr().out.split())
    convert_command(str(teacher), tmp_path / "out", layers="every:2", profile="qwen3_5", dry_run=True)
    assert "idle" not in capsys.readouterr().out


def test_norms_are_inserted_for_qwen3_5_only(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", **HYBRIDS["llama"])
    options: dict[str, Any] = {"text": text_file(tmp_path), "calibration_tokens": 256, "layers": "every:2"}
    options["mixer"] = "gated_deltanet"
    convert_command(str(teacher), tmp_path / "out", **options)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "deltanet_llama"
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["inserted_norms"] == []
    with pytest.raises(UserError, match="convert again with --profile qwen3_5, which inserts them"):
        export_command(str(tmp_path / "out"), tmp_path / "export")


def test_import_takes_an_export_back(tmp_path: Path) -> None:
    source = saved(exportable_model("qwen3", EVERY_OTHER), tmp_path / "model")
    export_command(str(source), tmp_path / "export")
    arguments = ["import", str(tmp_path / "export"), str(tmp_path / "back")]
    result = CliRunner().invoke(build_app("import"), [*arguments, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "deltanet_qwen3," in result.output
    assert not (tmp_path / "back").exists()
    assert CliRunner().invoke(build_app("import"), arguments).exit_code == 0
    before, after = ((folder / "config.json").read_text() for folder in (source, tmp_path / "back"))
    assert json.loads(before) == json.loads(after)
    with pytest.raises(UserError, match="lies in"):
        import_command(str(tmp_path / "export"), tmp_path / "export" / "inner")
    with pytest.raises(UserError, match="--dtype: got 'int8'"):
        import_command(str(tmp_path / "export"), tmp_path / "other", dtype="int8")
    with pytest.raises(UserError, match=r"holds no Qwen3\.5 text model"):
        import_command(str(source), tmp_path / "other")


def test_convert_names_the_command_that_imports(tmp_path: Path) -> None:
    source = saved(exportable_model("qwen3", EVERY_OTHER), tmp_path / "model")
    export_command(str(source), tmp_path / "export")
    with pytest.raises(UserError, match="already; `deltanet-hf import"):
        convert_command(str(tmp_path / "export"), tmp_path / "back")
    assert not (tmp_path / "back").exists()
