"""Generation tasks count the correct ones among known answers to known rows."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks.harness import Harness
from deltanet_hf.evaluation.tasks.suites import FULL, SuiteTask

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k/test": [{"question": f"{i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(4)],
    "gsm8k/train": [{"question": f"{i} + 2?", "answer": f"Two more.\n#### {i + 2}"} for i in range(8)],
    "trivia_qa/validation": [{"question": f"Who is {i}?", "answer": {"aliases": [f"King {i}"]}} for i in range(4)],
    "nq_open/validation": [{"question": f"who is {i}", "answer": [f"Queen {i}"]} for i in range(4)],
    "nq_open/train": [{"question": f"who was {i}", "answer": [f"Duke {i}"]} for i in range(8)],
    "lambada_openai/test": [{"text": f"Box number {i} holds a cat{i}"} for i in range(4)],
}
# Generated texts; the first two per task are correct.
REPLIES = {
    "gsm8k": [" One more.\n#### 1", " That makes 2.", " That makes 4.", " No idea"],
    "triviaqa": [" King 0", " king 1.", " King 1", " Nobody"],
    "nq_open": [" Queen 0", " queen 1", " Queen 1", " Nobody"],
    "lambada_last_word": [" cat0", " Cat1 and", " dog", " a cat3"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return folder


@pytest.mark.parametrize("name", REPLIES)
def test_exact_match_counts_what_was_written(data: Path, name: str) -> None:
    task = next(task for task in FULL if task.name == name)
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
