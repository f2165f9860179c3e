"""`--set` changes single settings of a profile, from the command line to the loaded model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltanet_convert.options import ConvertOptions, changed_settings
from deltanet_hf import LayerTable
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from support.command_line import CommandLine
from support.read_in_parts import read_in_parts
from support.refusals import assert_refused
from support.tiny_conversion import PLAIN, TOKENS, teacher_folder, text_file, tiny_conversion

QWEN3_5 = GatedDeltaNet.default_settings("qwen3_5")
IDS = torch.randint(4, 60, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("short_fit")
@torch.no_grad()
@pytest.mark.parametrize(
    ("mixer", "change", "key", "value"),
    [
        ("gated_deltanet", "rope=false", "rope", False),
        ("gated_deltanet", "qk_norm=false", "qk_norm", False),
        ("gated_deltanet", "qkv_bias=false", "qkv_bias", False),
        ("gated_deltanet", "qk_activation=silu", "qk_activation", "silu"),
        ("gated_deltanet", "conv_size=3", "conv_size", 3),
        ("gated_deltanet", "output_norm=none", "output_norm", "none"),
        ("gated_deltanet", "output_norm=shared", "output_norm", "shared"),
        ("gated_deltanet", "output_gate=false", "output_gate", False),
        ("gated_deltanet", "output_gate_rank=4", "output_gate_rank", 4),
        ("gated_deltanet", "expand_kv=false", "expand_kv", False),
        ("gated_deltanet", "gate_bias=false", "gate_bias", False),
        ("deltaproduct", "num_householder=3", "num_householder", 3),
        ("window", "window=5", "window", 5),
        ("window", "sinks=0", "sinks", 0),
    ],
)
def test_a_change_converts_loads_and_decodes(tmp_path: Path, mixer: str, change: str, key: str, value: object) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=1)
    report = tiny_conversion(teacher, tmp_path / "out", mixer=mixer, changes=(change,), calibration_tokens=128)
    assert report["options"]["set"] == {key: value}
    windows = {"window": f"see\nthe last {value} tokens and the first 4.", "sinks": "see\nthe last 481 tokens."}
    shown = windows[key] if mixer == "window" else f"`{key}: {json.dumps(value)}`"
    assert shown in (tmp_path / "out" / "README.md").read_text()
    check_result(tmp_path / "out", report, {key: value})


@pytest.mark.usefixtures("short_fit")
@torch.no_grad()
def test_several_changes_together(tmp_path: Path) -> None:
    """The settings of Qwen3.5's layer, which `--profile qwen3_5` has, with one change."""
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=1)
    wanted = {**QWEN3_5.to_dict(), **changed_settings(["rope=true"], QWEN3_5, "gated_deltanet")}
    changes = tuple(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in wanted.items())
    report = tiny_conversion(teacher, tmp_path / "out", changes=changes, calibration_tokens=128)
    check_result(tmp_path / "out", report, wanted)


def check_result(folder: Path, report: dict[str, Any], settings: dict[str, Any]) -> None:
    """The model in `folder` has the settings, was fitted, and decodes as it computes complete rows."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert settings.items() <= LayerTable.of(model.config).only_kind.to_dict().items()
    for layer in report["layers"] if report["options"]["mixer"] != "window" else ():
        assert layer["softmax_error"] < 1e-5
        assert layer["fit_mse"] < min(1.0, layer["search_mse"])
    complete = model(IDS).logits
    steps = read_in_parts(model, IDS, [1] * IDS.shape[1])
    torch.testing.assert_close(steps, complete, rtol=1e-3, atol=1e-3)


WRONG_CHANGES: list[tuple[tuple[str, ...], str]] = [
    (("rope",), "KEY=VALUE"),
    (("ropes=false",), "unknown key 'ropes'"),
    (("profile=qwen3_5",), "unknown key 'profile'"),
    (("rope=no",), "rope: got 'no', expected true or false"),
    (("conv_size=9",), "conv_size: got 9"),
    (("output_gate_rank=-1",), "output_gate_rank: got '-1'"),
    (("output_gate=false", "output_gate_rank=2"), "expected 0 because output_gate is false"),
    (("output_norm=false",), "output_norm: got False"),
    (("num_householder=2",), "unknown key 'num_householder'"),
    (("rope=false", "rope=true"), "twice"),
    (("output_norm=none", "output_gate=false"), "keep one of the two"),
]


def test_a_wrong_change_is_one_clear_error() -> None:
    rows = [
        ({**PLAIN, "changes": changes}, UserError, rf"^--set[^\n]*{re.escape(words)}[^\n]*$")
        for changes, words in WRONG_CHANGES
    ]
    assert_refused(ConvertOptions, rows)


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mixer": "deltaproduct", "changes": ("num_householder=0",)}, "^--set: num_householder: got 0, .* at least 1"),
    ({"mixer": "window", "changes": ("window=0",)}, "^--set: window: got 0, expected a whole number of at least 1"),
    ({"mixer": "mamba"}, "^--mixer: got 'mamba'; expected one of gated_deltanet, deltaproduct, linear, retention"),
    ({"profile": "native"}, "^--profile: got 'native', expected one of faithful, qwen3_5"),
    ({"profile": "qwen3_5", "changes": ("rope=true",)}, "^--set rope=true: --profile qwen3_5 fixes the settings"),
    ({"profile": "qwen3_5", "training": False}, "^--no-training: --profile qwen3_5 fixes the settings"),
    ({"mixer": "comba", "profile": "qwen3_5"}, "^--profile: got 'qwen3_5', but comba has only faithful"),
]


def test_options_that_do_not_fit_together_are_refused() -> None:
    assert_refused(ConvertOptions, [(options, UserError, message) for options, message in WRONG_OPTIONS])


def test_the_settings_depend_on_whether_the_model_will_be_trained() -> None:
    """SiLU on q and k is the better start and, after training, the worse end."""
    found = [ConvertOptions(**PLAIN, training=t).table(1, ()).only_kind.settings.qk_activation for t in (True, False)]
    assert found == ["none", "silu"]


@pytest.mark.usefixtures("short_fit")
@torch.no_grad()
def test_further_steps_hardly_change_the_start(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3", num_hidden_layers=2)
    reports = {
        n: tiny_conversion(teacher, tmp_path / str(n), mixer="deltaproduct", changes=(f"num_householder={n}",))
        for n in (1, 3)
    }
    for plain, more in zip(reports[1]["layers"], reports[3]["layers"], strict=True):
        assert more["relative_mse"] == pytest.approx(plain["relative_mse"], rel=0.05)
    first = [reports[n]["layers"][0] for n in (1, 3)]
    assert first[0]["fit_mse"] == first[1]["fit_mse"]  # the fit does not use the further steps
    assert reports[3]["held_out"]["perplexity"] == pytest.approx(reports[1]["held_out"]["perplexity"], rel=0.05)


@pytest.mark.usefixtures("quick_fit")
def test_changes_on_the_command_line(cli: CommandLine, tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", num_hidden_layers=1)
    arguments = ["convert", teacher, tmp_path / "out", "--pure", "--text", text_file(tmp_path)]
    arguments += ["--calibration-tokens", TOKENS]
    changes = ["--set", "rope=false", "--set", "conv_size=4"]
    assert cli(*arguments, "--profile", "qwen3_5", *changes) == 2
    assert "--profile qwen3_5 fixes the settings" in cli.err
    assert cli(*arguments, *changes) == 0
    wiring = json.loads((tmp_path / "out" / "config.json").read_text())["deltanet"]["kinds"]["linear"]
    assert (wiring["rope"], wiring["conv_size"]) == (False, 4)
    assert cli(*arguments, *changes, "--resume") == 0  # finished already, with the same options
    assert cli(*arguments, "--set", "rope=false", "--resume") == 2
