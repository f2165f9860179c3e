"""`deltanet-hf data`: evaluation arrays, decontamination against them, joined texts and the counts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltanet_hf.errors import UserError
from deltanet_recipes.command import data as data_command
from support.tiny_run import ALIGN, make_models, recipe_tree, write_recipe

SEPARATOR, FIRST = 2, 4  # ids of the separator and of the word w0
WINDOW = 20


def words(seed: int, count: int) -> str:
    return " ".join(f"w{word}" for word in np.random.default_rng(seed).integers(0, 60, count))


def ids(text: str) -> list[int]:
    return [FIRST + int(word[1:]) for word in text.split()]


def write(path: Path, records: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Articles, two books in pieces, and an evaluation text, in the working directory."""
    monkeypatch.chdir(tmp_path)
    make_models(tmp_path)
    articles = [{"title": f"t{i}", "text": words(i, 30 + i % 2)} for i in range(40)]
    articles[7]["text"] = "w1 w2 " + words(100, 13) + " w3"  # quotes the quiz
    articles[8]["text"] = words(200, 50)  # quotes a book that is kept for evaluation
    books = [{"book": book, "text": words(200 + i, 50)} for i, book in enumerate("aabbb")]
    write(Path("wiki.jsonl"), articles)
    write(Path("books/1.jsonl"), books[:3])
    write(Path("books/2.jsonl"), books[3:])
    write(Path("evaluation/quiz.jsonl"), [{"question": words(100, 13)}])
    return tmp_path


def tree(folder: Path, **wiki: Any) -> Path:
    sources = [
        {
            "path": "wiki.jsonl",
            "group_key": "title",
            "evaluation": [
                {"array": f"arrays/{name}/wiki.npy", "window": WINDOW, "groups": 4} for name in ("settings", "reported")
            ],
            **wiki,
        },
        {
            "path": "books",
            "group_key": "book",
            "join_groups": True,
            "evaluation": [{"array": "arrays/reported/books.npy", "window": WINDOW, "groups": ["a"]}],
        },
    ]
    data = {"sources": sources, "decontaminate": ["evaluation"], "cache": "tokens"}
    return write_recipe(folder, recipe_tree(folder, [ALIGN], output=str(folder / "run"), data=data))


def corpora(folder: Path) -> list[list[list[int]]]:
    """The documents of each source of the report."""
    found = {}
    for meta in folder.glob("tokens/*/meta.json"):
        starts = np.load(meta.parent / "starts.npy")
        tokens = np.fromfile(meta.parent / "tokens.bin", dtype=np.uint16).tolist()
        found[json.loads(meta.read_text())["source"]["path"]] = [tokens[begin:end] for begin, end in pairwise(starts)]
    return [found["wiki.jsonl"], found["books"]]


def test_groups_are_kept_whole_for_evaluation_and_nothing_of_them_is_trained_on(folder: Path) -> None:
    data_command(tree(folder))
    report = json.loads((folder / "run" / "data.json").read_text())
    wiki, books = corpora(folder)
    chosen = [array["groups"] for array in report[0]["evaluation"]]
    assert [len(groups) for groups in chosen] == [4, 4]
    assert not {"t7", *chosen[0]} & set(chosen[1])
    assert "t7" not in chosen[0]
    for array, groups in zip(report[0]["evaluation"], chosen, strict=True):
        expected = [ids(words(int(title[1:]), 30))[:WINDOW] for title in groups if title != "t8"]
        windows = np.load(array["array"]).reshape(-1, WINDOW).tolist()
        assert [window for window in windows if window != ids(words(200, 50))[:WINDOW]] == expected
    kept = {f"t{i}" for i in range(40)} - {"t7", "t8", *chosen[0], *chosen[1]}
    assert sorted(wiki) == sorted([*ids(words(i, 30 + i % 2)), SEPARATOR] for i in map(lambda t: int(t[1:]), kept))
    text = [*ids(words(200, 50)), *ids(words(201, 50))]
    assert np.load("arrays/reported/books.npy").tolist() == text[:100]
    assert books == [[token for i in (202, 203, 204) for token in ids(words(i, 50))] + [SEPARATOR]]


def test_the_report_counts_what_was_dropped_for_which_text(folder: Path) -> None:
    data_command(tree(folder, evaluation=[]))
    wiki, books = json.loads((folder / "run" / "data.json").read_text())
    assert wiki["contaminated_by"] == {
        "evaluation/quiz.jsonl": {"documents": 1, "tokens": 17},
        "reported/books.npy": {"documents": 1, "tokens": 51},
    }
    assert [wiki[f"documents_{name}"] for name in ("read", "held_out", "contaminated")] == [40, 0, 2]
    assert [books[f"documents_{name}"] for name in ("read", "held_out", "contaminated")] == [5, 2, 0]
    assert books["tokens_held_out"] == 102
    assert wiki["tokens"] == wiki["tokens_read"] - wiki["tokens_contaminated"]


def test_a_second_call_writes_nothing_and_a_lost_array_is_made_again(folder: Path) -> None:
    recipe = tree(folder)
    data_command(recipe)
    files = [path for name in ("arrays", "tokens") for path in (folder / name).rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    data_command(recipe)
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    lost = folder / "arrays/settings/wiki.npy"
    lost.unlink()
    data_command(recipe)
    assert lost.read_bytes() == before[lost][1]


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"window": 31, "groups": 30}, r"only \d+ documents of wiki.jsonl have 31 tokens; lower groups or window"),
        ({"window": 5, "groups": ["t1", "none"]}, r"no document of wiki.jsonl has title none"),
    ],
)
def test_evaluation_arrays_that_cannot_be_filled(folder: Path, evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        data_command(tree(folder, evaluation=[{"array": "a.npy", **evaluation}]))
