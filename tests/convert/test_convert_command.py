"""The command `deltanet-hf convert`: output, exit codes, no tracebacks."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deltanet_convert.start import START
from deltanet_convert.views import conversion_progress
from deltanet_convert.views.outlook import outlook
from deltanet_hf.version import install_command
from deltanet_recipes.config import read_recipe
from support.command_line import CommandLine
from support.tiny_conversion import TOKENS, quick_start, teacher_folder, text_file


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    monkeypatch.setenv("COLUMNS", "200")
    return teacher_folder(tmp_path / "teacher", "llama", num_hidden_layers=2)


def test_conversion(cli: CommandLine, teacher: Path, tmp_path: Path) -> None:
    text = text_file(tmp_path)
    code = cli("convert", teacher, tmp_path / "out", "--pure", "--text", text, "--calibration-tokens", TOKENS)
    printed = cli.out
    assert code == 0
    assert "Gated DeltaNet" in printed
    assert "perplexity" in printed
    lines = [
        line for line in printed.splitlines() if re.fullmatch(r"\d/2 0:00:\d\d layer \d on .+, relative MSE .+", line)
    ]
    assert [line[:3] for line in lines] == ["1/2", "2/2"]  # not a terminal: a line per layer
    assert "Layers are run and fitted on" in printed
    out = tmp_path / "out"
    assert json.loads((out / "conversion.json").read_text())["held_out"]["kl"] > 0.3
    assert printed.splitlines()[-1] == (
        "Far from its teacher: train it before use. Training on a GPU (9.9M tokens brought SmolLM2-135M to 0.26, "
        "with attention in every fourth layer to 0.16): deltanet-hf distill smollm2-135m-pure data.separator=null "
        f"student={out} output={out}-trained 'data.decontaminate=[]' 'data.sources=[{{path: TEXT}}]'"
    )
    assert (tmp_path / "out" / "config.json").exists()


def layer(title: str, created: int = 1, kept: int = 0, kind: str = "made") -> dict[str, Any]:
    bytes_per_token = {"kept_kv_bytes_per_token": kept, "kv_bytes_per_token": 8}
    return {"title": title, "created": created, "kind": kind, **bytes_per_token}


STAYS = layer("softmax", 0, 8, "softmax")


@pytest.mark.parametrize(
    ("kl", "teacher", "layers", "begins", "command"),
    [
        (0.01, ("llama", 1e8), [layer("window 9", 0), STAYS], "Close to", "smollm2-135m-windows"),
        (0.13, ("gemma3_text", 1e9), [layer("window 9", 0)], "Apart from its teacher. Training", "qwen3-0.6b"),
        (0.01, ("llama", 3e9), [layer("window 9", 0)], "Close to", "llama-3.2-1b"),
        (0.01, ("llama", 7e9), [layer("window 9", 0)], "Close to", "llama-3.1-8b"),
        (0.13, ("gemma3_text", 2.7e8), [layer("window 9", 0), STAYS], "Apart from", "gemma-3-270m-32k"),
        (0.77, ("gemma3_text", 2.7e8), [layer("Gated DeltaNet")], "Far from its teacher", "qwen3-0.6b"),
        (0.04, ("qwen2", 5e8), [layer("Gated DeltaNet + window 9")], "Close to", "qwen2.5-coder-0.5b"),
        (0.77, ("qwen2", 5e8), [layer("Gated DeltaNet")], "Far from its teacher", "qwen3-0.6b"),
        (0.24, ("llama", 1e8), [layer("Gated DeltaNet + window 9")], "Apart from its teacher", "smollm2-135m"),
        (0.77, ("llama", 1e8), [layer("Gated DeltaNet")], "Far from its teacher: train it", "smollm2-135m-pure"),
        (0.0, ("qwen2", 6e8), [layer("FoX", 1, 9)], "Close to", "qwen3-0.6b stages.distil.ce_weight=1"),
        (0.0, ("llama", 1e8), [layer("FoX", 1, 9)], "Close to", "smollm2-135m-pure stages.distil.ce_weight=1"),
    ],
)
def test_the_last_line_says_how_good_it_is_and_what_to_do(
    kl: float, teacher: tuple[str, float], layers: list[dict[str, Any]], begins: str, command: str
) -> None:
    model_type, parameters = teacher
    plan = {"teacher_parameters": parameters, "layers": layers, "positions": None}
    report = {"plan": plan, "held_out": {"kl": kl}, "teacher": {"model_type": model_type}}
    line = outlook(report, Path("a b"), 49152)
    assert line.startswith(begins)
    assert ("Qwen2.5-Coder-0.5B" in line) == (command == "qwen2.5-coder-0.5b")
    assert f": deltanet-hf distill {command} 'student=a b' 'output=a b-trained' 'data." in line
    recipe, *overrides = shlex.split(line.partition("deltanet-hf distill ")[2])
    assert read_recipe(recipe, overrides).student == "a b"


@pytest.mark.parametrize(
    ("title", "created"), [("window 9", 0), ("Gated DeltaNet + window 9", 1), ("Gated DeltaNet", 1)]
)
def test_another_small_model_ends_documents_with_its_own_token(title: str, created: int) -> None:
    """Not with token 0 of SmolLM2's recipes."""
    plan = {"teacher_parameters": 1e8, "layers": [layer(title, created)], "positions": None}
    report = {"plan": plan, "held_out": {"kl": 0.2}, "teacher": {"model_type": "llama"}}
    recipe, *overrides = shlex.split(outlook(report, Path("out"), 50257).partition("deltanet-hf distill ")[2])
    assert read_recipe(recipe, overrides).data.separator is None


@pytest.mark.parametrize("layers", [[layer("window 9", 0), STAYS], [layer("Gated DeltaNet + window 9")], [STAYS]])
def test_what_reads_further_is_trained_on_longer_rows(layers: list[dict[str, Any]]) -> None:
    """With states or without, and a teacher that keeps all layers; rows of 32k are for a model that reads as far."""
    report: dict[str, Any] = {"held_out": {"kl": 0.2}, "teacher": {"model_type": "llama"}}
    for context, recipe in ((32768, "smollm2-135m-32k"), (16384, "smollm2-135m")):
        positions = {"kind": "yarn", "teacher": 8192, "context": context}
        report["plan"] = {"teacher_parameters": 1e8, "layers": layers, "positions": positions}
        assert f": deltanet-hf distill {recipe}" in outlook(report, Path("out"), 49152)
        assert ("needles" in outlook(report, Path("out"), 49152)) == (context == 32768)


def test_where_all_layers_stay_there_is_nothing_to_train() -> None:
    plan = {"teacher_parameters": 1, "layers": [STAYS], "positions": None}
    near, far = (outlook({"plan": plan, "held_out": {"kl": kl}}, Path("out"), 97) for kl in (0.004, 0.4))
    assert near.endswith(" text like this. Its weights are the teacher's, so there is nothing to train.")
    assert far.startswith("Far from its teacher: its keys and values need more bits, by deltanet_hf.set_cache_bits(")
    assert far.endswith("). Its weights are the teacher's, so there is nothing to train.")


def test_a_terminal_shows_a_bar() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with conversion_progress.shown_on(console, [True, True], "cuda:1") as show:
        show(1, 2, "layer 0", {"relative_mse": 0.25})
        show(2, 2, "layer 1", {})
    assert "layer 1 on cuda:1" in shown.getvalue()
    assert "2/2" in shown.getvalue()


def test_the_time_that_is_left_is_that_of_the_layers_to_be_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(conversion_progress.time, "monotonic", lambda: now[0])

    def lines(first: int) -> list[str]:
        shown, fitted = io.StringIO(), [index != 2 for index in range(6)]  # layer 2 stays as it is
        now[0] = 100.0
        with conversion_progress.shown_on(Console(file=shown, width=200), fitted, "cpu") as show:
            if first:
                show(first, 6, "resumed", {})
            for index in range(first, 6):
                now[0] += 10 * fitted[index]
                show(index + 1, 6, f"layer {index}", {})
            show(6, 6, "perplexity", {})
        return [line.partition("about ")[2].strip() for line in shown.getvalue().splitlines()]

    assert lines(0) == ["0:00:40 left", "0:00:30 left", "0:00:30 left", "0:00:20 left", "0:00:10 left", "", ""]
    assert lines(2) == ["", "", "0:00:20 left", "0:00:10 left", "", ""]  # nothing is known of the run before


def test_default_text_is_announced(cli: CommandLine, teacher: Path, tmp_path: Path) -> None:
    assert cli("convert", teacher, tmp_path / "out", "--pure", "--calibration-tokens", TOKENS) == 0
    assert "text shipped with deltanet-hf" in cli.out
    assert "shipped" in json.loads((tmp_path / "out" / "conversion.json").read_text())["text"]["source"]


def test_dry_run_prints_the_plan_and_writes_nothing(cli: CommandLine, teacher: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli("convert", teacher, tmp_path / "out", "--dry-run", "--keep", "every:2") == 0
    printed = cli.out
    assert "stays softmax" in printed
    assert re.search(r"│ +128 │", printed)  # the teacher's positions
    assert "1,024" not in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_settings_are_listed_without_a_teacher(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli("convert", "--set", "help") == 0
    assert re.search(r"^allow_neg_eigval +true, false +write strengths up to 2", cli.out, re.MULTILINE)


def test_json_is_all_that_stdout_holds(cli: CommandLine, teacher: Path, tmp_path: Path) -> None:
    assert cli("convert", teacher, tmp_path / "out", "--pure", "--dry-run", "--json") == 0
    assert json.loads(cli.out)["converted_layers"] == [0, 1]
    text = text_file(tmp_path)
    arguments = ["--pure", "--json", "--text", text, "--calibration-tokens", 128]
    assert cli("convert", teacher, tmp_path / "out", *arguments) == 0
    assert json.loads(cli.out) == json.loads((tmp_path / "out" / "conversion.json").read_text())


@pytest.mark.parametrize(
    "arguments", [["--keep", "layers:9"], ["--shard-size", "many", "--pure"], ["--text", "missing.txt", "--pure"]]
)
def test_user_errors_are_one_line_and_exit_code_2(
    cli: CommandLine, teacher: Path, tmp_path: Path, arguments: list[str]
) -> None:
    assert cli("convert", teacher, tmp_path / "out", *arguments) == 2
    error = cli.err.strip()
    assert error.startswith("error: ")
    assert arguments[0] in error
    assert "\n" not in error
    assert [file.name for file in tmp_path.iterdir() if file.name != "teacher"] == []


def test_teacher_without_tokenizer_is_exit_code_2(cli: CommandLine, teacher: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (teacher / name).unlink()
    assert cli("convert", teacher, tmp_path / "out", "--pure") == 2
    assert "tokenizer" in cli.err


def test_interruption_is_exit_code_130_and_resumable(
    cli: CommandLine, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    arguments = [teacher, tmp_path / "out", "--pure", "--text", text_file(tmp_path), "--calibration-tokens", TOKENS]
    with monkeypatch.context() as patch:
        patch.setitem(START, "gated_deltanet", interrupt)
        assert cli("convert", *arguments) == 130
    assert "Interrupted. The same command with --resume" in cli.out
    assert cli("convert", *arguments, "--resume") == 0


def test_parquet_without_its_package_names_the_extra(
    cli: CommandLine, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # importing it raises ModuleNotFoundError
    assert cli("convert", teacher, tmp_path / "out", "--pure", "--text", tmp_path / "text.parquet") == 2
    assert cli.err == f"error: pyarrow is not installed; run {install_command('train')}\n"
    assert not (tmp_path / "out").exists()
