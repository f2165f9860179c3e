"""Generation tasks count the correct ones among known answers to known rows; programs are run, if that is allowed."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks import code_eval
from deltanet_hf.evaluation.tasks.code_eval import CodeEval, passes
from deltanet_hf.evaluation.tasks.harness import Harness
from deltanet_hf.evaluation.tasks.lm_eval_run import run_lm_eval
from deltanet_hf.evaluation.tasks.suites import ALLOW_CODE, CODE, FULL, SuiteTask, check_packages

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k/test": [{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(4)],
    "gsm8k/train": [{"question": f"{i} + 2?", "answer": f"Two more.\n#### {i + 2}"} for i in range(8)],
    "trivia_qa/validation": [{"question": f"Who is {i}?", "answer": {"aliases": [f"King {i}"]}} for i in range(4)],
    "nq_open/validation": [{"question": f"who is {i}", "answer": [f"Queen {i}"]} for i in range(4)],
    "nq_open/train": [{"question": f"who was {i}", "answer": [f"Duke {i}"]} for i in range(8)],
    "lambada_openai/test": [{"text": f"Box number {i} holds a cat{i}"} for i in range(4)],
    "humaneval/test": [
        {
            "prompt": f'def add{i}(x):\n    """Add {i} to x."""\n',
            "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
            "entry_point": f"add{i}",
        }
        for i in range(4)
    ],
    "mbpp/test": [{"text": f"Add {i} to x.", "test_list": [f"assert add(1) == {i + 1}"] * 3} for i in range(4)],
}
# Generated texts; the first two per task are correct.
REPLIES = {
    "gsm8k": [" One more.\n#### 1", " That makes 2.", " That makes 4.", " No idea"],
    "triviaqa": [" King 0", " king 1.", " King 1", " Nobody"],
    "nq_open": [" Queen 0", " queen 1", " Queen 1", " Nobody"],
    "lambada_last_word": [" cat0", " Cat1 and", " dog", " a cat3"],
    "humaneval": ["    return x", "    y = 1\n    return x + y", "    return x", "    return +"],
    "mbpp": ["def add(x):\n  return x\n", "add = lambda x: x + 1", "def sub(x):\n  return x + 2\n", "exit(0)"],
}
TASKS = {task.name: task for task in (*FULL, *CODE)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return folder


@pytest.mark.parametrize("name", REPLIES)
def test_what_was_written_is_scored(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_CODE, "1")
    task = TASKS[name]
    prompts: list[str] = []

    def generate_until(instances: list[Any]) -> list[str]:
        prompts.extend(instance.args[0] for instance in instances)
        return [REPLIES[name][instance.doc_id] for instance in instances]

    (result,) = Harness((task,), data, None).run(SimpleNamespace(generate_until=generate_until)).values()
    assert result.samples.tolist() == [1, 1, 0, 0]
    score = result.scores[task.metric]
    assert (score.value, score.items) == (0.5, 4)
    assert score.stderr == pytest.approx(math.sqrt(1 / 3) / 2)
    assert not any(reply in prompt.split("\n\n")[-1] for prompt, reply in zip(prompts, REPLIES[name], strict=True))


def test_rows_that_cannot_be_had_are_one_line() -> None:
    """Without a network, the message says what to do."""
    with pytest.raises(UserError, match=r"^lambada_last_word: [^\n]*Hub[^\n]*; give local files with --data$"):
        Harness((SuiteTask("lambada_last_word", "exact_match", 0.0),), None, None)


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("open('a', 'w').write('b')\nassert open('a').read() == 'b'", True),
        ("assert 1 + 1 == 3", False),
        ("exit(0)", False),
        ("input()", False),
        ("while True: pass", False),
    ],
)
def test_a_program_passes_that_comes_to_its_end(
    program: str, passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_eval, "SECONDS", 0.5 if "while" in program else 10)
    assert passes(program) is passed
    assert not Path("a").exists()


def test_what_a_program_may_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program itself checks that it is refused."""
    monkeypatch.setattr(code_eval, "SECONDS", 10)
    file = tmp_path / "kept"
    file.write_text("as it was")
    for call, error in (
        ("__import__('socket').socket()", "PermissionError"),
        ("__import__('subprocess').run(['true'])", "PermissionError"),
        (f"__import__('os').remove('{file}')", "PermissionError"),
        (f"open('{file}', 'a')", "PermissionError"),
        ("bytes(1 << 33)", "MemoryError"),
    ):
        assert passes(f"try:\n    {call}\nexcept {error}:\n    pass\nelse:\n    raise ValueError"), call
    assert file.read_text() == "as it was"


def test_eval_runs_the_suite(
    data: Path, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALLOW_CODE, "1")
    run_lm_eval(str(teacher_folder), ["--limit", "1", "--gen_kwargs", "max_gen_toks=2"], data=data, suite="code")
    table = capsys.readouterr().out
    for task, metric in (("humaneval", "pass@1"), ("mbpp", "pass_at_1")):
        (line,) = (line for line in table.splitlines() if line.startswith(f"|{task}"))
        assert f"|{metric}" in line


def test_pass_at_k_of_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_eval, "passes", lambda program: program.startswith("right"))
    monkeypatch.setenv(ALLOW_CODE, "1")
    programs = [["right"] + ["wrong"] * 3, ["wrong"] * 4]
    found, right = CodeEval().compute(["", ""], programs, k=[1, 2, 4])
    assert found == {"pass@1": 1 / 8, "pass@2": 1 / 4, "pass@4": 1 / 2}
    assert right[0] == [True, False, False, False]


def test_programs_are_not_run_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_CODE, raising=False)
    with pytest.raises(UserError, match=r"^--suite code runs programs that the model writes; allow it with HF_ALLOW"):
        check_packages("code")
    with pytest.raises(UserError, match="are run if HF_ALLOW_CODE_EVAL=1 is set"):
        CodeEval().compute(["x"], [["y"]], k=[1])
