"""A model that cannot be exported is refused before any work; the error names the obstacle and a remedy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from deltanet_convert.export.export_command import export_command, refuse_obstacles
from deltanet_convert.export.obstacles import FORMATS, export_obstacles, teacher_obstacles
from deltanet_hf import LayerTable, converted_config
from deltanet_hf.errors import UserError
from deltanet_hf.models.families import FAMILIES
from deltanet_recipes.cli import build_app
from support.refusals import assert_refused
from support.tiny_export import EVERY_OTHER, ROTARY, SIZES, exportable_model, exportable_table, saved
from support.tiny_models import teacher_config

ALL = (0, 1, 2, 3)
LLAMA3 = ROTARY["llama3"]
YARN = ROTARY["yarn"]
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


def config(model_type: str, layers: tuple[int, ...] = ALL, wiring: dict[str, Any] | None = None, **changes: Any) -> Any:
    config_class: Any = FAMILIES[model_type].config_class
    teacher = config_class(**{**SIZES, **changes})
    return converted_config(teacher, exportable_table(layers, wiring))


SETTINGS: dict[str, Any] = {  # of a layer, as Qwen3.5's does not have them
    **dict.fromkeys(("rope", "gate_bias", "k_offset", "allow_neg_eigval", "shared_kv"), True),
    **{"qk_activation": "none", "v_activation": "none", "output_norm": "per_head", "state_dtype": "bfloat16"},
    **{"conv_size": 0, "output_gate": False, "output_gate_rank": 2, "window": 64},
}
REFUSED: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "hidden_act": (config("llama", hidden_act="gelu"), "hidden_act", FORMATS),
    "mlp_bias": (config("llama", mlp_bias=True), "mlp_bias", FORMATS),
    "attention_bias": (config("llama", attention_bias=True), "attention_bias", FORMATS),
    **{
        name: (config("llama", wiring={name: value}), f"{name} of layers 0-3", FORMATS)
        for name, value in SETTINGS.items()
    },
    "qk_norm": (config("qwen3", wiring={"qk_norm": True}), "qk_norm of layers 0-3", FORMATS),
    "several writes": (
        config("llama", wiring={"mixer": "deltaproduct", "profile": "faithful"}),
        "mixer of layers 0-3",
        FORMATS,
    ),
    "q/k/v bias": (config("qwen2", wiring={"qkv_bias": True}), "qkv_bias of layers 0-3", FORMATS),
    "llama hybrid": (config("llama", EVERY_OTHER), "kept layers", FORMATS),
    "sliding window": (config("qwen3", EVERY_OTHER, **SLIDING), "sliding window", FORMATS),
    "llama3": (config("qwen3", EVERY_OTHER, rope_parameters=LLAMA3), "rope_parameters", ("gguf",)),
    "ramp": (config("qwen3", EVERY_OTHER, rope_parameters={**YARN, "beta_fast": 16}), "rope_parameters", ("gguf",)),
    "scale": (
        config("qwen3", EVERY_OTHER, rope_parameters={**YARN, "attention_factor": 0.7}),
        "rope_parameters",
        ("mlx", "gguf"),
    ),
    "dynamic": (
        config("qwen3", EVERY_OTHER, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_parameters",
        ("mlx", "gguf"),
    ),
}


def test_obstacle_is_named_with_its_remedy() -> None:
    for case, (refused, name, formats) in REFUSED.items():
        found = [obstacle for obstacle in export_obstacles(refused) if obstacle.name == name]
        assert len(found) == 1, case
        assert found[0].formats == formats, case
        assert found[0].remedy, case


def test_layers_share_a_reason() -> None:
    table = exportable_table((0, 1, 3), {"window": 64}).with_windows((64, 128, 64, 1024))
    (window, kept) = export_obstacles(converted_config(FAMILIES["llama"].config_class(**SIZES), table))
    assert str(window).startswith("window of layers 0-1, 3: ")
    assert window.problem.endswith(", the model has 64 to 1,024")
    assert kept.name == "kept layers"


def test_rotary_embeddings_that_every_runtime_computes() -> None:
    for rope_type, spelt_out in (("linear", {}), ("yarn", {"beta_fast": 32.0, "beta_slow": 1.0})):
        rope = {**ROTARY[rope_type], "attention_factor": None, **spelt_out}
        assert export_obstacles(config("qwen3", EVERY_OTHER, rope_parameters=rope)) == []


def test_families_with_another_skeleton_are_refused() -> None:
    for model_type in ("olmo2", "olmo3", "granite", "gemma2", "gemma3_text", "phi3", "mixtral"):
        teacher = teacher_config(model_type)
        assert [obstacle.name for obstacle in teacher_obstacles(teacher, [])] == ["family"], model_type
        converted = converted_config(teacher, LayerTable.preset(4, profile="qwen3_5"))
        assert "family" in [obstacle.name for obstacle in export_obstacles(converted)], model_type


def test_fully_converted_models_have_no_obstacle() -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "smollm3"):
        assert export_obstacles(config(model_type)) == [], model_type
        assert teacher_obstacles(FAMILIES[model_type].config_class(**SIZES), []) == [], model_type


def test_hybrids_before_conversion() -> None:
    assert teacher_obstacles(FAMILIES["qwen3"].config_class(**SIZES), EVERY_OTHER) == []
    for model_type in ("llama", "mistral", "qwen2"):  # q/k norms will be inserted; Mistral's window is the longest text
        assert teacher_obstacles(FAMILIES[model_type].config_class(**SIZES), EVERY_OTHER) == []
    windowed = FAMILIES["mistral"].config_class(**{**SIZES, "sliding_window": 8})
    assert [obstacle.name for obstacle in teacher_obstacles(windowed, EVERY_OTHER)] == ["sliding window"]
    named = [o.name for o in teacher_obstacles(FAMILIES["smollm3"].config_class(**SIZES), EVERY_OTHER)]
    assert named == ["kept layers"]


def test_refusal_lists_every_obstacle(tmp_path: Path) -> None:
    folder = saved(exportable_model("llama", EVERY_OTHER, wiring={"gate_bias": True}), tmp_path / "model")
    with pytest.raises(UserError) as caught:
        refuse_obstacles(folder, "gguf")
    assert "gate_bias of layers 0, 2:" in str(caught.value)
    assert "kept layers" in str(caught.value)
    with pytest.raises(UserError, match="kept layers"):
        export_command(str(folder), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_check_says_which_formats_are_possible(tmp_path: Path) -> None:
    rope = {"max_position_embeddings": 256, "rope_parameters": LLAMA3}
    folder = saved(exportable_model("qwen3", (1, 2), **rope), tmp_path / "model")
    result = CliRunner().invoke(build_app("export"), ["export", str(folder), "--check"])
    assert result.exit_code == 0
    assert "mlx: yes gguf: no rope_parameters: " in " ".join(result.output.split())
    assert "(gguf only)" in " ".join(result.output.split())
    assert "get 2 idle layers of zeros among the 4" in " ".join(result.output.split())
    whole = saved(exportable_model("llama"), tmp_path / "whole")
    result = CliRunner().invoke(build_app("export"), ["export", str(whole), "--check"])
    assert result.output.split() == ["transformers:", "yes", "mlx:", "yes", "gguf:", "yes"]
    other = saved(exportable_model("llama", wiring={"rope": True}), tmp_path / "other")
    result = CliRunner().invoke(build_app("export"), ["export", str(other), "--check"])
    assert result.output.count("Qwen3.5's linear layers have no rotary embedding") == 1


def test_teachers_and_strangers_are_refused(tmp_path: Path) -> None:
    teacher = FAMILIES["llama"].model_class(FAMILIES["llama"].config_class(**SIZES))
    teacher.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match=r"deltanet-hf convert --profile qwen3_5.*--dry-run"):
        export_command(str(tmp_path / "teacher"), tmp_path / "out")
    with pytest.raises(UserError, match="GGUF"):
        export_command("model.gguf", tmp_path / "out")


def test_options_are_checked(tmp_path: Path) -> None:
    folder = saved(exportable_model("llama"), tmp_path / "model")
    rows = [
        ({"style": "onnx"}, "--format"),
        ({"dtype": "int4"}, "--dtype"),
        ({"dtype": "q8_0"}, "--dtype"),
        ({"prompt": "The sea"}, "--verify"),
    ]
    export = functools.partial(export_command, str(folder), tmp_path / "out")
    assert_refused(export, [(options, UserError, said) for options, said in rows])


def test_verification_needs_a_tokenizer(tmp_path: Path) -> None:
    exportable_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"holds no tokenizer; copy tokenizer\.json"):
        export_command(str(tmp_path / "model"), tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    export_command(str(tmp_path / "model"), tmp_path / "out")
    assert (tmp_path / "out").exists()


def test_weights_that_contradict_the_config_are_named(tmp_path: Path) -> None:
    folder = saved(exportable_model("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name, tensor, message in (
        ("model.layers.1.self_attn.conv1d.weight", torch.zeros(7, 1, 4), "has shape"),
        ("model.layers.2.self_attn.decay.A_log", None, "is missing"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), "has no place"),
    ):
        others = {key: value for key, value in weights.items() if key != name}
        save_file(others if tensor is None else {**others, name: tensor}, folder / "model.safetensors")
        with pytest.raises(UserError, match=rf"model\.safetensors: tensor '{name}' {message}"):
            export_command(str(folder), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_output_may_not_lie_in_the_model(tmp_path: Path) -> None:
    folder = saved(exportable_model("llama"), tmp_path / "model")
    with pytest.raises(UserError, match="OUT"):
        export_command(str(folder))
    with pytest.raises(UserError, match="lies in"):
        export_command(str(folder), folder / "inner")


def test_float16_that_underflows_is_refused(tmp_path: Path) -> None:
    model = exportable_model("llama").half()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(-1e-3)
        model.model.layers[1].self_attn.q_proj.weight.fill_(3e-7)
    folder = saved(model, tmp_path / "model")
    with pytest.raises(UserError, match="underflows; choose --dtype"):
        export_command(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()
