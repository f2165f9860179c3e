"""The examples and the commands of README.md run in small."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot

from deltanet_convert.start import START
from deltanet_hf.evaluation.tasks.suites import SUITES
from deltanet_hf.mixers import MIXERS
from deltanet_recipes.training.logbook import read_log
from support.command_line import CommandLine
from support.tiny_conversion import quick_start, teacher_folder
from support.tiny_gguf import write_gguf
from support.tiny_run import ALIGN, make_text, recipe_tree, write_recipe
from tests.test_documents import FENCED, command_lines

FOLDER = Path(__file__).parents[1] / "examples"
README = FOLDER.parent / "README.md"
TEACHERS = {
    "meta-llama/Llama-3.2-1B": "llama",
    "Qwen/Qwen3-0.6B": "qwen3",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
}  # and the family of the tiny one that takes its place
DATA = ["data.decontaminate=[]", "data.sources=[{path: text.jsonl}]", "data.holdout_tokens=256", "data.repeat=true"]
STAGE = {"tokens": 256, "sequence_length": 128, "batch_tokens": 128, "micro_batch_rows": 1}
SMALL = {
    "convert": ["--keep", "every:4", "--calibration-tokens", "256"],  # random weights have no recall to keep
    "distill": [*DATA, *(f"stages.{stage}.{key}={STAGE[key]}" for stage in range(3) for key in STAGE)],
    "report": ["--limit", "1", "--windows", "1", "--baselines", "none"],
    "eval": ["--limit", "1"],
    "generate": ["--max-new-tokens", "2"],
}  # what is added to each command


def example(name: str) -> dict[str, Any]:
    """The names that a file defines."""
    return runpy.run_path(str(FOLDER / name))


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    return teacher_folder(tmp_path / "teacher", "llama", max_position_embeddings=512)


@pytest.mark.parametrize("script", [*sorted(FOLDER.glob("*.sh")), README], ids=lambda script: script.name)
def test_the_commands_of_a_script_run(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    """With a tiny teacher, text and tasks of this machine in the place of the Hub's, and `SMALL`.

    README's installation and its line of `python -m lm_eval` are not run: they need the network.
    """
    text = script.read_text(encoding="utf-8")
    if script is README:
        text = "".join(block[2] for block in FENCED.finditer(text) if block[1] == "sh")
    name = next(name for name in TEACHERS if name in text)
    teacher_folder(tmp_path / "teacher", TEACHERS[name], max_position_embeddings=512, head_dim=64)
    make_text(tmp_path / "text.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    monkeypatch.setitem(SUITES, "texts", replace(SUITES["texts"], pairs=(), needle_lengths=(), text_windows=(128,)))
    commands = []
    for line in command_lines(f"```sh\n{text.replace(name, 'teacher').replace('arc_easy,sciq', 'demo_cloze')}```"):
        command, *arguments = shlex.split(line, comments=True)[1:]
        assert cli(command, *arguments, *SMALL[command]) == 0, line
        commands.append(command)
        assert ("|demo_cloze" in cli.out) == (command == "eval")
    assert {"convert", "distill", "generate"} <= set(commands)
    (recipe,) = tmp_path.rglob("final/recipe.json")
    trained = {row["stage"] for row in read_log(recipe.parents[1]) if "loss" in row}
    assert len(trained) == len(json.loads(recipe.read_text())["stages"]) == 3
    assert (tmp_path / "report/report.md").exists() == ("report" in commands)


def test_the_readme_converts_trains_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(START, "gated_deltanet", quick_start)
    write_gguf(tmp_path / "teacher.gguf")
    readme = README.read_text(encoding="utf-8")
    code = re.search(r"<!-- example: quickstart [^\n]*-->\n```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    example = code[1]
    recipe = write_recipe(tmp_path, recipe_tree(tmp_path, [ALIGN], data={"sources": []}))
    small = {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': repr(str(tmp_path / "teacher.gguf")),
        '"demo"': repr(str(recipe)),
        '"student")': '"student", keep="every:2")',  # SmolLM2's plan is shipped
    }
    for real, tiny in small.items():
        assert real in example
        example = example.replace(real, tiny)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "trained/final/recipe.json").exists()
    assert len(capsys.readouterr().out) > len("Water boils at")


def test_a_layer_from_the_operators_learns_to_recall(capsys: pytest.CaptureFixture[str]) -> None:
    example("layer_from_kernels.py")["main"](150)
    first, *_, last, both = capsys.readouterr().out.splitlines()
    recalled = [int(line.split(", ")[1].partition("%")[0]) for line in (first, last)]
    assert recalled[0] < 15  # chance is 6
    assert recalled[1] > 60
    assert float(both.split()[-1]) < 1e-4  # token by token


def test_a_rule_of_ones_own(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = example("add_rule.py")
    monkeypatch.setitem(MIXERS, "steady_deltanet", names["SteadyDeltaNet"])  # and take it away after the test
    names["main"](str(teacher), str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["deltanet"]["kinds"]["linear"]["mixer"] == "steady_deltanet"
    assert "nats per token" in capsys.readouterr().out


def test_fine_tuning_with_trl(teacher: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from deltanet_convert import convert

    convert(teacher, tmp_path / "student", keep="every:4", mixer="gated_deltanet", calibration_tokens=256)
    rows = [{"prompt": f"What is {n}?", "completion": f" It is {n}."} for n in range(16)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    example("trl_sft.py")["main"](str(tmp_path / "student"), str(tmp_path / "data.jsonl"), str(tmp_path / "out"), "2")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["deltanet"]["cache_bits"] == 4


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM's OpenAI interface does."""

    def _answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "student"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {"content": f"{asked['model']} was asked: {asked['messages'][-1]['content']}"}
        self._answer({"choices": [{"message": reply}], "usage": {"completion_tokens": 7}})

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    serving = HTTPServer(("localhost", 0), Server)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://localhost:{serving.server_port}"
    serving.shutdown()


def test_a_client_of_vllm(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    example("vllm_client.py")["main"]("Who?", server)
    assert capsys.readouterr() == ("student was asked: Who?\n", "student: 7 tokens\n")


def test_the_notebook_runs(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEACHER", str(teacher))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    cells = json.loads((FOLDER / "gated_deltanet.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            small = code.replace("LAYOUT = {}", 'LAYOUT = {"keep": "every:2", "set": {"window": 65}}')
            exec(compile(small, "gated_deltanet.ipynb", "exec"), names)
    assert names["LAYOUT"]  # SmolLM2's plan is shipped
    assert "strength 2: parity right at 100%" in capsys.readouterr().out
    recalled = names["recalled"]
    assert recalled(16, "decayed") > 0.9  # and of outdated values, linear attention forgets none:
    assert max(recalled(128, "decayed"), recalled(16, "off")) < 0.8
    assert torch.all(names["g"] <= 0)
    mixing = names["mixing"]
    assert torch.all(mixing[:64] == 0)  # nothing has left the window
    assert torch.all((mixing[128:] > 0) & (mixing[128:] < 1))
