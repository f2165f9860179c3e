"""`deltanet-hf convert` without options, `--layers auto` and `--pure`: layers, mixer, notices and contradictions."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deltanet_convert.convert_command import convert_command
from deltanet_convert.select import for_convert, objectives, probes, read_selection
from deltanet_convert.select.probe_text import FORMATS
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.start import START
from deltanet_hf import loading
from deltanet_hf.errors import UserError
from deltanet_recipes.cli import main
from support.far_model import FAR_HEAD, FAR_LAYER, far_folder
from support.tiny_conversion import TOKENS, opened, quick_start, teacher_folder, text_file, tiny_job
from support.tiny_selection import QUICK

AUTO: dict[str, Any] = {"layers": "auto", "mixer": "gated_deltanet+window"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setitem(START, "gated_deltanet", quick_start)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection by short probes of two formats, by the method of a machine without a GPU."""
    options = {key: value for key, value in QUICK.items() if key != "method"}
    monkeypatch.setattr(for_convert, "SelectOptions", lambda **given: SelectOptions(**{**options, **given}))
    monkeypatch.setattr(probes, "CHARACTERS", 2000)
    monkeypatch.setattr(objectives, "selection_probes", partial(probes.selection_probes, formats=FORMATS[:2]))


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return far_folder(tmp_path_factory.mktemp("teachers") / "far")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_folder(tmp_path_factory.mktemp("teachers") / "teacher", "llama")


def kinds(out: Path) -> tuple[list[str], dict[str, Any]]:
    """The kind of each layer, and the settings of the converted ones."""
    table = json.loads((out / "config.json").read_text())["deltanet"]
    (kind,) = table["kinds"].values()
    return table["layers"], kind


@pytest.mark.usefixtures("quick")
def test_without_options_and_gpu_derivatives_plan_heads_and_windows_in_4_bits(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [far, tmp_path / "out", "--text", text_file(tmp_path), "--calibration-tokens", TOKENS]
    monkeypatch.setattr(sys, "argv", ["deltanet-hf", "convert", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert (
        "Measuring what to keep (--keep auto, 11%@2k), in about ten minutes for 0.5B parameters on two cores; --keep"
        in printed
    )
    assert f": layer {FAR_LAYER}, key/value head {FAR_HEAD}, score " in printed
    table = json.loads((tmp_path / "out" / "config.json").read_text())["deltanet"]
    assert table["cache_bits"] == 4
    selection = json.loads((tmp_path / "out" / "conversion.json").read_text())["selection"]
    assert selection["method"] == "gradient"
    assert selection["order"][0] == [FAR_LAYER, FAR_HEAD]
    mixed = table["kinds"][table["layers"][FAR_LAYER]]
    assert mixed["heads"][FAR_HEAD] == "softmax"
    assert mixed["linear_mixer"] == "gated_deltanet"
    assert mixed["linear"]["delayed"]
    assert [table["kinds"][name]["window"] for name in table["layers"]] == selection["planned_windows"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


@pytest.mark.usefixtures("quick")
def test_a_dry_run_measures_nothing_and_has_the_bytes(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(for_convert, "run_selection", None)
    convert_command(str(far), tmp_path / "out", dry_run=True, keep="14%@512")
    assert "the conversion measures what to keep (--keep 14%@512)" in " ".join(capsys.readouterr().out.split())
    job = tiny_job(far, tmp_path / "out", dry_run=True, layers="auto:14%@512", mixer="window", cache_bits=4)
    ((window,),) = ({kind.settings.window for kind in job.table.kinds.values()},)
    taken = sum(layer.cache_bytes(512) for layer in job.plan.layers)
    assert 0.13 < taken / sum(layer.kv_bytes(512) for layer in job.plan.layers) <= 0.14
    assert job.table.softmax == []
    assert window == 417


STATES, ALONE = "Gated DeltaNet + window 257", "window of 481"


@pytest.mark.parametrize(
    ("family", "options", "titles"),
    [
        ("llama", {"keep": "none"}, {STATES}),
        ("llama", {"keep": "every:4"}, {STATES}),
        ("llama", {"keep": "every:1"}, set()),
        ("llama", {"keep": "none", "context": "512"}, {ALONE}),
        ("gemma3_text", {"keep": "none"}, {ALONE}),  # some of its layers slide
        ("gemma3_text", {"keep": "layers:0,2,3", "mixer": "gated_deltanet+window"}, {STATES}),
    ],
    ids=str,
)
def test_windows_have_states_but_with_context_and_in_teachers_that_slide(
    tmp_path: Path, family: str, options: dict[str, Any], titles: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family)
    convert_command(str(teacher), tmp_path / "out", dry_run=True, as_json=True, **options)
    shown = capsys.readouterr()
    layers = json.loads(shown.out)["layers"]
    assert {layer["title"] for layer in layers if layer["kind"] != "softmax"} == titles
    assert ("Windows alone (--mixer window): the default with --context" in shown.err) == (titles == {ALONE})


def test_pure_converts_every_layer_to_the_state_alone(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_file(tmp_path)
    convert_command(str(teacher), tmp_path / "out", pure=True, text=text, calibration_tokens=TOKENS)
    assert "Measuring" not in capsys.readouterr().out
    layers, kind = kinds(tmp_path / "out")
    assert layers == ["linear"] * 4
    assert (kind["mixer"], kind["window"]) == ("gated_deltanet", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pure": True, "layers": "every:2"}, "--pure: converts all layers to gated_deltanet; leave out --keep"),
        ({"pure": True, "layers": "all"}, "--pure: "),
        ({"pure": True, "mixer": "window"}, "--pure: "),
        (
            {"profile": "qwen3_5", "mixer": "gated_deltanet+window"},
            "--profile: got 'qwen3_5', whose layer has no window; take the mixer gated_deltanet",
        ),
        ({"layers": "automatic"}, "--keep: got 'automatic'; expected auto, 40MB@32k, 5%@16k, "),
    ],
)
def test_contradictions_are_one_line(teacher: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        convert_command(str(teacher), tmp_path / "out", **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_profile_for_export_has_no_window_and_no_selection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "qwen3")
    convert_command(str(teacher), tmp_path / "out", profile="qwen3_5", dry_run=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["converted_layers"] == [0, 1, 2, 3]


def test_a_teacher_of_a_shipped_shape_keeps_the_shipped_layers(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, shape in for_convert.SHAPES.items():  # of which each ships selections that fit
        for name in (file, f"states-{file}"):
            shipped = read_selection(for_convert.SHIPPED / name)
            assert {key: getattr(shipped, key) for key in shape.keys() & vars(shipped).keys()}.items() <= shape.items()
    (file, shape), lines = next(iter(for_convert.SHAPES.items())), []
    units = {"unit": "layer", "kept": ((0,), (2,)), "order": ((2,), (0,)), "planned_windows": (33,) * 4}
    tiny = replace(shipped, num_hidden_layers=4, num_key_value_heads=2, **units)
    (tmp_path / f"states-{file}").write_text(json.dumps(tiny.to_json()))
    monkeypatch.setattr(for_convert, "SHIPPED", tmp_path)
    config = tiny_job(teacher, tmp_path / "first").teacher.config
    known = {key: getattr(config, key) for key in shape}
    monkeypatch.setitem(for_convert.SHAPES, file, known)
    options = for_convert.ConvertOptions(**AUTO)

    def measured(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("measured")

    monkeypatch.setattr(for_convert, "run_selection", measured)

    def chosen(out: str) -> Any:
        job = tiny_job(teacher, tmp_path / out, **AUTO)
        show = lambda done, total, line: lines.append(line)  # noqa: E731
        assert for_convert.auto_selection(job.teacher, tmp_path / out, options, show) == job.selection
        return job

    assert chosen("same").table.softmax == [0, 2]
    assert lines == ["Softmax layers: those shipped for SmolLM2-135M-Instruct, a model of this shape."]
    for key, value in known.items():  # one key that differs makes it another shape
        other = value + 1 if isinstance(value, int) else "qwen3"
        monkeypatch.setitem(for_convert.SHAPES, file, {**known, key: other})
        with pytest.raises(ValueError, match="measured"):
            chosen("other")


def test_a_teacher_that_cannot_be_measured_is_refused_with_what_convert_can_do(tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", max_position_embeddings=40)  # too short for a question
    with pytest.raises(UserError) as caught:
        tiny_job(teacher, tmp_path / "out", layers="auto:2", mixer="window")
    assert str(caught.value).startswith("--keep 2: --window 64: with 4 sinks it shows all 40 tokens of a probe;")
    assert str(caught.value).endswith("or spread the softmax layers evenly with --keep every:4")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["teacher", "text.txt"]


SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}


@pytest.mark.parametrize(
    ("family", "changes", "kept"),
    [
        ("llama", {"num_hidden_layers": 2}, [1]),
        ("llama", {"num_hidden_layers": 9}, [2, 6]),
        ("gemma3_text", {}, [0, 2, 3]),  # two of its four layers slide and stay; the last of the others
        ("gemma3_text", SIX, [0, 1, 2, 4, 5]),  # three slide and stay, and two of the others
    ],
)
def test_auto_keeps_a_quarter_or_half_of_the_candidates_and_at_least_one(
    tmp_path: Path, family: str, changes: dict[str, Any], kept: list[int]
) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family, **changes)
    options = {"layers": "auto", "mixer": "gated_deltanet", "dry_run": True}
    assert tiny_job(teacher, tmp_path / "out", **options).table.softmax == kept
    shutil.rmtree(teacher)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("family", "options", "keep", "device", "method"),
    [
        ("llama", {}, "11%@2k", "cpu", "gradient"),
        ("llama", {"cache_bits": 16}, "1", "cpu", "gradient"),
        ("llama", {"changes": ("window=64",)}, "1", "cuda", "forward"),
        ("llama", {"mixer": "gated_deltanet+window"}, "11%@2k", "cuda", "forward"),
        ("llama", {"mixer": "gated_deltanet+window", "changes": ("delayed=false",)}, "1", "cpu", "gradient"),
        ("llama", {"mixer": "gated_deltanet"}, "1", "cpu", "gradient"),
        ("gemma3_text", {}, "1", "cuda", "forward"),
    ],
)
def test_auto_plans_windows_where_it_can(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    keep: str,
    device: str,
    method: str,
) -> None:
    asked, lines = [], []

    def run(planned: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append((planned.options.keep.text, planned.spending is not None, planned.options.method))
        raise UserError("not measured")

    monkeypatch.setattr(loading, "chosen_device", lambda name: torch.device(device))
    monkeypatch.setattr(for_convert, "run_selection", run)
    chosen = for_convert.ConvertOptions(**{"layers": "auto", "mixer": "window", "cache_bits": 4} | options)
    teacher = opened(teacher_folder(tmp_path / "teacher", family))
    with pytest.raises(UserError, match="not measured"):
        for_convert.auto_selection(teacher, tmp_path / "out", chosen, lambda done, total, line: lines.append(line))
    assert asked == [(keep, keep == "11%@2k", method)]
    assert lines[0].startswith(f"Measuring what to keep (--keep auto, {keep}), in ")
    assert lines[0].endswith("; --keep every:4 keeps evenly spread layers at once.")
