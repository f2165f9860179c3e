"""The suites that papers report: RULER's texts, SQuAD as completion, IFEval, and what is said to be missing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks import suites
from deltanet_hf.evaluation.tasks.harness import Harness
from deltanet_hf.evaluation.tasks.lm_eval_run import run_lm_eval, suite_tasks
from deltanet_hf.evaluation.tasks.local_data import TASKS, missing_files
from deltanet_hf.evaluation.tasks.ruler import STOCK, Ruler
from deltanet_hf.evaluation.tasks.suites import SUITES
from deltanet_hf.models.cache_bits import set_cache_bits
from measuring.study import unpadded_lm
from measuring.study.model_facts import load_for_measure
from measuring.study.task_suites import COLUMNS, TaskSuites
from measuring.study.unpadded_lm import continuations
from support.replayed_step import EmulatedCapture
from support.tiny_conversion import tiny_tokenizer
from support.tiny_models import tiny_teacher

LENGTH = 2048  # bytes, for the tokenizer of the tests has one token per byte


def answering(harness: Harness, reply: Any) -> dict[str, Any]:
    """The results of a model whose answer to a row is `reply(row, prompt)`."""

    def generate_until(instances: list[Any]) -> list[str]:
        return [reply(instance.doc, instance.args[0]) for instance in instances]

    return harness.run(SimpleNamespace(generate_until=generate_until))


@pytest.mark.slow  # the import of lm-eval's module takes most of a minute
@pytest.mark.parametrize("name", [name for name in STOCK if name.startswith("niah")])
def test_the_texts_of_ruler_hold_their_answers(
    name: str, teacher_folder: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six texts of a task instead of lm-eval's 500."""
    pytest.importorskip("wonderwords")
    monkeypatch.setattr(pytest.importorskip("nltk"), "download", lambda *_, **__: False)  # lm-eval calls it
    (task,) = (task for task in SUITES["ruler"].tasks if task.name == name)
    prompts: list[list[str]] = []
    for _ in range(2):
        harness = Harness((task,), None, 4, Ruler(LENGTH, str(teacher_folder), samples=6))
        prompts.append([instance.args[0] for instance in harness.parts[name][0].instances])
    assert prompts[0] == prompts[1]
    right = answering(harness, lambda row, prompt: " ".join(row["outputs"]))[name]
    half = answering(harness, lambda row, prompt: "" if row["index"] % 2 else " ".join(row["outputs"]))[name]
    assert len(harness.parts[name][0].eval_docs) == 6
    assert right.samples.tolist() == [1.0] * 4
    assert 0 < half.scores["recall"].value < 1
    for prompt, instance in zip(prompts[0], harness.parts[name][0].instances, strict=True):
        assert len(tokenizer(prompt)["input_ids"]) <= LENGTH
        assert all(answer in prompt for answer in instance.doc["outputs"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suites")
    rows = [{"text": f" Rivers.\nThe {n}th river is called ", "value": f" Nile{n} "} for n in range(4)]
    (folder / "squad_completion").mkdir()
    (folder / "squad_completion/validation.jsonl.gz").write_bytes(
        gzip.compress("\n".join(map(json.dumps, rows)).encode())
    )
    return folder


def test_squad_is_completed(data: Path) -> None:
    harness = Harness(SUITES["completion"].tasks, data, None)
    replies = {0: "the nile0, which", 1: "Nile1", 2: "Nile1", 3: "Rhine"}
    prompts: list[str] = []

    def reply(row: dict[str, Any], prompt: str) -> str:
        prompts.append(prompt)
        return replies[len(prompts) - 1]

    assert answering(harness, reply)["squad_completion"].samples.tolist() == [1, 1, 0, 0]
    assert prompts[0] == "Rivers.\nThe 0th river is called"


def test_squad_as_olmo_has_it() -> None:
    row = {"id": "1", "query": "Title: Nile\nQuestion: Which river?\nAnswer:", "choices": ["the Nile"]}
    assert TASKS["squad_completion"].adapt(row) == {"text": row["query"], "value": "the Nile"}


@pytest.mark.parametrize("bits", [16, 4])
def test_columns_of_a_row(
    data: Path, teacher_folder: Path, tokenizer: PreTrainedTokenizerFast, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suites with data are scored, also through a packed cache; for the others the row says what is missing."""
    replies = {"0th": "the nile0, which", "1th": "Nile1", "2th": "Nile1", "3th": "Rhine"}

    def answered(model: Any, prompts: list[torch.Tensor], count: int) -> torch.Tensor:
        """Known answers in the places of those of a model that knows none."""
        made = continuations(model, prompts, count).clone()
        for row, prompt in zip(made, prompts, strict=True):
            (reply,) = (reply for key, reply in replies.items() if key in tokenizer.decode(prompt))
            ids = tokenizer(f" {reply}", add_special_tokens=False)["input_ids"]
            row[:] = torch.tensor([*ids, *[tokenizer.eos_token_id] * (count - len(ids))])
        return made

    monkeypatch.setattr(unpadded_lm, "continuations", answered)
    suites = TaskSuites(data, str(teacher_folder), tokenizer, longest=1024)
    assert {*suites.missing, "completion"} == {*COLUMNS}
    assert suites.missing["ifeval"] == "no ifeval/train.jsonl"
    model = set_cache_bits(load_for_measure(str(teacher_folder), torch.device("cpu")), bits)
    found = suites(model)
    assert found.keys() == {"completion"}
    assert found["completion"].sizes.tolist() == [1] * 4
    assert found["completion"].sums.tolist() == [1.0, 1.0, 0.0, 0.0]


@torch.no_grad()
@pytest.mark.parametrize("bits", [16, 4])
def test_prompts_of_different_lengths_are_continued_as_each_alone(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = set_cache_bits(tiny_teacher("llama"), bits)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 97, (length,), generator=generator) for length in (70, 66, 71)]
    found = continuations(model, prompts, 6)
    assert found.shape == (3, 6)
    for prompt, tokens in zip(prompts, found, strict=True):
        text = prompt[None]
        for _ in tokens:
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert tokens.tolist() == text[0, len(prompt) :].tolist()
    capture = EmulatedCapture()
    monkeypatch.setitem(CAPTURES, "cpu", capture)
    assert continuations(model, prompts, 6).tolist() == found.tolist()
    assert (capture.captured, capture.replayed) == (1, 71 + 6 - 66 - 1)


def test_ifeval_counts_prompts_and_instructions(tmp_path: Path) -> None:
    for package in ("immutabledict", "langdetect"):
        pytest.importorskip(package)
    checks = {"no commas": ("punctuation:no_comma", {}), "wrapped": ("startend:quotation", {})}
    rows = [
        {
            "key": n,
            "prompt": "Write.",
            "instruction_id_list": [checks[c][0] for c in chosen],
            "kwargs": [{}] * len(chosen),
        }
        for n, chosen in enumerate((["no commas"], ["no commas", "wrapped"]))
    ]
    (tmp_path / "ifeval").mkdir()
    (tmp_path / "ifeval/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = answering(Harness(SUITES["ifeval"].tasks, tmp_path, None), lambda row, prompt: "No comma here.")["ifeval"]
    assert found.samples.tolist() == [1, 0]
    assert found.scores["inst_level_strict_acc"].value == pytest.approx(2 / 3)
    tokenizer = tiny_tokenizer()
    for template, prompt in ((None, "Write."), ("{{ messages[0].content }} Now!", "Write. Now!")):
        tokenizer.chat_template = template
        (part,) = Harness(SUITES["ifeval"].tasks, tmp_path, None, chat=tokenizer).parts["ifeval"]
        assert [instance.args[0] for instance in part.instances] == [prompt] * 2


def test_suites_name_known_tasks() -> None:
    known = {*TASKS, *STOCK, "blimp"}
    assert all(task.name in known for suite in SUITES.values() for task in suite.tasks)
    assert {task.name for task in SUITES["ruler"].tasks} == set(STOCK)
    assert len(SUITES["standard"].tasks) == 8


def test_what_is_missing_is_said(
    data: Path, data_folder: Path, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = r"arc_challenge/test.jsonl, winogrande/validation.jsonl, openbookqa/test.jsonl"
    with pytest.raises(UserError, match=rf"^--suite standard: \S+ has no {lacking}; without --data, rows come"):
        run_lm_eval(str(teacher_folder), [], data=data_folder, suite="standard")
    assert missing_files(["squad_completion"], data) == []
    with pytest.raises(UserError, match=r"--suite rulers: unknown; choose one of small, full, standard, ruler"):
        suite_tasks("rulers", None)
    with pytest.raises(UserError, match="--suite and --tasks: give one of them"):
        run_lm_eval(str(teacher_folder), ["--tasks", "piqa"], suite="standard")
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--suite ruler needs nltk and scipy and wonderwords; run pip install"):
        suite_tasks("ruler", None)
