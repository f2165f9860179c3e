"""Stock tasks on local files have the stock prompts and the rows of the folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.tasks.demo_tasks import cloze, repeat
from deltanet_hf.evaluation.tasks.local_data import write_task_folder


@pytest.fixture(scope="module")
def tasks(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    names = write_task_folder(folder, data_folder)
    assert {"piqa", "lambada_openai", "arc_easy", "boolq", "sciq", "hellaswag", "blimp_wh_island"} <= set(names)
    assert "winogrande" not in names
    return TaskManager(include_path=str(folder), include_defaults=False)


def requests(tasks: TaskManager, name: str) -> list[list[tuple[str, str]]]:
    """(context, continuation) of each request, per document."""
    task = tasks.load([name])["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(rank=0, world_size=1)
    pairs: dict[int, list[tuple[str, str]]] = {}
    for instance in task.instances:
        pairs.setdefault(instance.doc_id, []).append(instance.args)
    return list(pairs.values())


def test_prompts_are_the_stock_ones(tasks: TaskManager) -> None:
    for name, first in {
        "lambada_openai": [("Box 0 holds a", " cat")],
        "piqa": [("Question: Cut 0\nAnswer:", " Saw it."), ("Question: Cut 0\nAnswer:", " Eat it.")],
        "arc_easy": [("Question: What is 0?\nAnswer:", f" {word}") for word in ("one", "two", "six")],
        "boolq": [("Numbers.\nQuestion: is 0 odd?\nAnswer:", f" {word}") for word in ("no", "yes")],
        "blimp_wh_island": [("", " The 0 cats sit."), ("", " The 0 cats sits.")],
        "hellaswag": [("Cooking: Pan 0. He", f" {w}") for w in ("sits.", "runs.", "eats.", "cuts.")],
    }.items():
        built = requests(tasks, name)
        assert len(built) == 6
        assert built[0] == first


def test_boolean_answers_become_labels(tasks: TaskManager) -> None:
    task = tasks.load(["boolq"])["tasks"]["boolq"]
    assert [task.doc_to_target(doc) for doc in task.validation_docs()] == [0, 1, 0, 1, 0, 1]


def test_group_reads_local_rows(tasks: TaskManager) -> None:
    loaded = tasks.load(["blimp_adjunct_island", "blimp_wh_island"])["tasks"]
    docs = [list(task.validation_docs()) for task in loaded.values()]
    assert [{doc["UID"] for doc in rows} for rows in docs] == [{"adjunct_island"}, {"wh_island"}]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A folder with a text of 9000 random words."""
    rng = random.Random(0)
    words = [a + b + c for a in "bcdfg" for b in "aeiou" for c in "lmnprstvxz"]
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(9000)))
    return str(tmp_path)


@pytest.mark.parametrize("build", [cloze, repeat])
def test_demo_tasks_are_deterministic_and_sound(build: Callable[..., dict[str, Dataset]], text: str) -> None:
    rows = list(build(text, items=20)["test"])
    assert rows == list(build(text, items=20)["test"])
    assert len(rows) >= 15
    assert all(len(set(row["options"])) == 4 for row in rows)
    assert {row["gold"] for row in rows} == {0, 1, 2, 3}


def test_the_repeats_answer_is_the_next_word_of_the_passage(text: str) -> None:
    for row in repeat(text, items=20)["test"]:
        first, copy = row["context"].split("\n\n")
        assert first.startswith(f"{copy} {row['options'][row['gold']]} ")


def test_folders_and_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for folder, said in (("none", "no such data folder"), ("", "no file of a known task")):
        with pytest.raises(UserError, match=said):
            write_task_folder(tmp_path, tmp_path / folder)
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text('{"goal": 1}\nnot json\n')
    write_task_folder(tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"validation.jsonl: line 2 is not JSON"):
        TaskManager(include_path=str(tmp_path), include_defaults=False).load(["piqa"])
