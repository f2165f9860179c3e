"""The generated tables of the documents are current, and the figures in sentences are those of a row."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpu_tests
from comparison_tables import KL, SHARES
from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.window import WindowAttention
from measuring.study.items import load_items
from readme_tables import BLOCK, rewritten

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
KL_NAMES = ("kl_1k", "kl_4k", "kl_8k")
KL_OF_A_ROW = re.compile(r"(?<![\d/] )\b0\.\d{3,4}(?: / 0\.\d{3,4}){2}\b(?! /)")
GENERATED = [page for page in PAGES if "\n<!-- end of " in (ROOT / page).read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_current(name: str) -> None:
    """If this fails, run `python tools/readme_tables.py README.md docs/*.md docs/research/*.md`."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert BLOCK.search(text)
    assert rewritten(text, ROOT) == text


def test_kl_in_sentences_is_that_of_a_row() -> None:
    """KL at 1k / 4k / 8k in prose or a recipe stands in a result file; journals also tell of runs that have no row."""
    rows = [triples(json.loads(path.read_text())) for path in (ROOT / "recipes/results").glob("*.json")]
    known = set(itertools.chain.from_iterable(rows))
    recipes = (ROOT / "recipes/deltanet_recipes/yaml").glob("*.yaml")
    for page in [*(ROOT / name for name in PAGES if "/journal-" not in name), *recipes]:
        lines = (
            line.lstrip("# ") for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")
        )
        assert set(KL_OF_A_ROW.findall(" ".join(lines))) <= known, page


def triples(found: Any) -> Iterator[str]:
    """KL at the three lengths of every row in a result file, rounded to three digits and to the four of the tables."""
    if isinstance(found, dict) and all(isinstance(found.get(name), float) for name in KL_NAMES):
        yield from (" / ".join(f"{found[name]:.{digits}f}" for name in KL_NAMES) for digits in (3, 4))
    for part in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from triples(part)


def test_the_front_follows_from_the_outcomes_of_its_items() -> None:
    """Every value and error of a row is that of its kept windows and probes."""
    for path in sorted((ROOT / "recipes/results").glob("*-items.json.xz")):
        check_items(path.with_name(path.name.replace("-items.json.xz", ".json")))


def check_items(results: Path) -> None:
    items = load_items(results)
    for row in json.loads(results.read_text()):
        clusters = {**items[row["run"]].clusters}
        if "top1_4k" in clusters:
            clusters["top1"] = clusters["top1_4k"]
        for name in [name for name in (*KL, *SHARES) if row.get(name) is not None]:
            score, scale = clusters[name].score, 1 if name in KL else 100
            assert row[name] == pytest.approx(scale * score.value, abs=2e-5 * scale), (row["run"], name)
            assert row[f"{name}_se"] == pytest.approx(scale * score.stderr, abs=2e-5 * scale), (row["run"], name)


def test_the_table_of_rules_has_every_rule() -> None:
    rules = yaml.safe_load((ROOT / "recipes/results/rules.yaml").read_text())["rows"]
    attention = {WindowAttention.name, MixedHeads.name}  # which have no rule of their own
    assert sorted(row["rule"] for row in rules) == sorted(MIXERS.keys() - attention)


def test_a_table_without_results_is_empty(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("{results: absent.json, columns: [mb_2k], rows: [{run: x, label: X}]}")
    text = "<!-- front: f.yaml (note) -->\n<!-- end of front -->\n"
    assert rewritten(text, tmp_path) == text


def test_changes_are_those_from_the_base(tmp_path: Path) -> None:
    rows = [
        {"run": "a", "kl_1k": 0.05, "needles_2k": 33.0},
        {"run": "b", "kl_1k": 0.1, "needles_2k": 30.5},
        {"run": "c", "error": "!"},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    layout = {"results": "rows.json", "base": "a", "columns": ["kl_1k", "needles_2k"]}
    text = "before\n<!-- changes: c.yaml (note) -->\nold\n<!-- end of changes -->\nafter\n"

    def lines(*names: str) -> list[str]:
        (tmp_path / "c.yaml").write_text(
            json.dumps({**layout, "rows": [{"run": name, "label": name} for name in names]})
        )
        return rewritten(text, tmp_path).splitlines()

    assert lines("a", "b")[:2] == ["before", "<!-- changes: c.yaml (note) -->"]
    assert lines("a", "b")[4:] == ["| a | +0% | +0.0 |", "| b | +100% | -2.5 |", "<!-- end of changes -->", "after"]
    with pytest.raises(UserError, match="no measured run 'c'"):
        lines("c")


def test_the_record_of_gpu_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of several runs of pytest; a test that fails is counted, and known to the caller."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than the tests
    (tmp_path / "test_one.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    skipped = "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass\ndef test_right(): pass\n"
    (tmp_path / "test_two.py").write_text(skipped)
    files = [["-p", "no:cacheprovider", str(tmp_path / f"test_{name}.py")] for name in ("one", "two")]
    text = "<!-- gpu: run.json -->\n<!-- end of gpu -->"
    assert "No run is recorded" in rewritten(text, tmp_path)
    assert gpu_tests.record(files[1:], "abc1234", tmp_path / "run.json") == 0
    assert gpu_tests.record(files, "abc1234", tmp_path / "run.json") == 1
    cells = rewritten(text, tmp_path).splitlines()[3].split(" | ")
    assert (cells[0], cells[6:]) == ("| abc1234", ["2", "1", "1", "0 |"])
    with pytest.raises(UserError, match="ended without results"):
        gpu_tests.counted(["--no-such-option"])
