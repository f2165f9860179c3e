"""The generated tables of the documents are current; the measurement gives known figures for a known model."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from transformers import PreTrainedConfig

import gpu_tests
from comparison_tables import KL, SHARES
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Settings, Text, measure, repeated
from deltanet_hf.evaluation.tasks.text_windows import windows
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.window import WindowAttention
from measuring.rows import RowFile
from measuring.study.items import load_items
from mixers_table import mixers
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


def test_rows_of_a_table_may_come_from_several_files(tmp_path: Path) -> None:
    figures = {"kl_1k": 0.01, "kl_4k": 0.02, "kl_8k": 0.03, "mb_32k": 27.4}
    (tmp_path / "a.json").write_text(json.dumps([{"run": "x", "prose_2k": 40.0, "prose_2k_se": 1.5, **figures}]))
    states = {"run": "x", "prose_2k": 50.0, "stderr": {"prose_2k": 1.7}, **figures, "mb_32k": 4.59}
    (tmp_path / "b.json").write_text(json.dumps([states]))
    rows = [{"run": "x", "label": "here"}, {"run": "x", "label": "there", "results": "b.json"}]
    layout = {"results": "a.json", "columns": ["mb_32k", "kl_1k kl_4k kl_8k", "prose_2k"], "rows": rows}
    (tmp_path / "t.yaml").write_text(json.dumps(layout))
    lines = rewritten("<!-- front: t.yaml -->\n<!-- end of front -->", tmp_path).splitlines()
    assert lines[3:-1] == [
        "| here | 27 | 0.0100 / 0.0200 / 0.0300 | 40.0 ± 1.5 |",
        "| there | 4.6 | 0.0100 / 0.0200 / 0.0300 | 50.0 ± 1.7 |",
    ]


def test_what_vllm_serves_of_both_models(tmp_path: Path) -> None:
    rows = [
        {"shape": shape, "kind": kind, "sequences": count, "step_ms": ms, "tokens_per_second": 1e3 * ms, "fits": fits}
        for shape, count in (("8B", 16), ("8B", 1), ("135M", 1))
        for kind, ms, fits in (("teacher", 6.0 + count, 203), ("windows4bit", 7.25, 1184))
    ]
    rows = [row | {"tokens": 2048} for row in rows]
    (tmp_path / "v.json").write_text(json.dumps({"rows": rows}))
    lines = rewritten("<!-- served: v.json -->\n<!-- end of served -->", tmp_path).splitlines()
    assert lines[3:-1] == [
        "| 1 x 2,048 | 7.0 / 7.2 | 7,000 / 7,250 | 203 / 1,184 |",
        "| 16 x 2,048 | 22.0 / 7.2 | 22,000 / 7,250 | 203 / 1,184 |",
    ]


def test_speeds_are_those_of_the_fastest_mode(tmp_path: Path) -> None:
    labels = {"shape": "135M", "batch": 16, "context": 2048}
    rows = [
        {**labels, "kind": kind, "mode": mode, "decode_ms": ms, "prefill_tokens_per_s": 1e4 / ms, "cache_mb": cache}
        for kind, cache in (("teacher", 755), ("by_layer", 76))
        for mode, ms in (("eager", 8.0), ("graph", 2.0 if kind == "teacher" else 1.0), ("compiled", 4.0))
    ]
    failed = {**labels, "kind": "by_layer", "mode": "compiled", "batch": 1, "error": "out of memory"}
    (tmp_path / "s.json").write_text(json.dumps({"rows": [*rows, failed]}))
    lines = rewritten("<!-- speed: s.json -->\n<!-- end of speed -->", tmp_path).splitlines()
    point = "| 135M, 16 x 2,048 |"
    assert [line for line in lines if line.startswith("| 135M")] == [
        f"{point} 5.0k | 10.0k |", f"{point} 2.00 | 1.00 |", f"{point} 755 | 76 |"
    ]  # fmt: skip


def kernel_table(folder: Path, rows: list[dict[str, Any]], **head: str) -> list[str]:
    (folder / "k.json").write_text(json.dumps({**head, "rows": rows}))
    return rewritten("<!-- kernels: k.json -->\n<!-- end of kernels -->", folder).splitlines()[1:-1]


def test_kernels_are_compared_by_graph(tmp_path: Path) -> None:
    """Eager times stand for what no graph could hold, and are marked; errors and missing rows are dashes."""
    shape = {"shape": [4, 8192, 32, 128]}
    mix = shape | {"gates": "flash_qla"}
    eager = {"fwd_ms": 9.0, "fwdbwd_ms": 99.0}
    rows = [
        shape | {"impl": "deltanet", **eager, "fwd_graph_ms": 0.5804, "fwdbwd_graph_ms": 125.2},
        shape | {"impl": "sdpa", "error": "more value heads than query heads"},
        mix | {"impl": "deltanet", **eager, "fwd_graph_ms": 0.6, "fwdbwd_not_captured": "waits"},
        mix | {"impl": "flashinfer", "fwd_ms": 0.5, "fwd_graph_ms": 0.4251},
    ]
    assert kernel_table(tmp_path, rows, shape="B, T, H, D; of all rows") == [
        "Milliseconds in a CUDA graph, forward / forward + backward (* launched eagerly, because no graph holds it):",
        "",
        "| B, T, H, D | log decays | deltanet-hf | FlashInfer, norm outside | FlashInfer, norm outside / deltanet-hf |",
        "|---|---|---|---|---|",
        "| 4, 8192, 32, 128 | (-1, 0) | 0.580 / 125 | - | - |",
        "| 4, 8192, 32, 128 | FlashQLA's | 0.600 / 99.0* | 0.425 / - | 0.71 / - |",
    ]
    rules = [{"rule": "kda", "shape": [1, 2, 3, 4], "gates": [-5.0, 0.0], "impl": "deltanet", **eager}]
    assert kernel_table(tmp_path, rules) == [
        "Milliseconds, launched eagerly, forward / forward + backward:",
        "",
        "| rule | B, T, heads, head size | log decays | deltanet-hf |",
        "|---|---|---|---|",
        "| kda | 1, 2, 3, 4 | (-5, 0) | 9.00 / 99.0 |",
    ]


def test_the_table_of_a_window(tmp_path: Path) -> None:
    """More implementations than have room for ratios; one is missing, one is not captured, one has no backward pass."""
    impls = ("deltanet", "deltanet, 4 bits", "flex_attention", "sdpa, mask", "sdpa, all tokens")
    times = {"fwd_ms": 2.0, "fwd_graph_ms": 1.0, "fwdbwd_ms": 8.0, "fwdbwd_graph_ms": 7.0}
    figures = [times, times | {"fwd_graph_ms": 0.0664}, {"error": "!"}, {"fwd_ms": 2.0, "error": "backward: !"}, times]
    rows = [{"shape": [16, 2048, 9, 3, 64, 64], "impl": impl} | row for impl, row in zip(impls, figures, strict=True)]
    assert kernel_table(tmp_path, rows, shape="B, T, HQ, HK, D, window; 4 sinks, bfloat16")[2:] == [
        "| B, T, HQ, HK, D, window | deltanet-hf | deltanet-hf, 4 bits | SDPA, mask | SDPA, all tokens |",
        "|---|---|---|---|---|",
        "| 16, 2048, 9, 3, 64, 64 | 1.00 / 7.00 | 0.0664 / 7.00 | 2.00* / - | 1.00 / 7.00 |",
    ]


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


def rule(run: str, **values: Any) -> dict[str, Any]:
    """A row of the study of mixers."""
    common = {"mixer": "kda", "set": {}, "kept": [], "tokens": 9_879_552, "seed": 0, "rate": 1e-3}
    figures = dict.fromkeys(("kl", "wt2", "heldwiki", "repeat", "needles_1k", "pairs_8"), 2.0)
    return {"run": run, **common, **figures, "kl_se": 0.1, "decode_ms": 9.0, **values}


def test_a_table_per_budget_joins_seeds_and_lists_failures() -> None:
    rows = [
        rule("teacher", mixer="softmax", kept=[0, 1], tokens=0, kl=0.0),
        rule("kda-all-s0", kl=0.4),
        rule("kda-all-s1", kl=0.5, seed=1),
        rule("kda-all-fast-s0", rate=3e-3),
        rule("kda-kept-s0", kept=[0]),
        rule("delta-all-3m-s0", mixer="deltaproduct", set={"num_householder": 3, "allow_neg_eigval": True}, tokens=3e6),
        {"run": "mesa-all-s0", "error": "it diverged"},
    ]
    blocks = mixers(rows).split("\n\n")
    assert blocks[0::2] == [
        "**All layers converted, 10M tokens**",
        "**All layers converted, 3M tokens**",
        "**1 layers softmax, 10M tokens**",
        "failed: mesa-all-s0 (it diverged)",
    ]
    lines = blocks[1].splitlines()
    assert lines[0].startswith("| | KL | WikiText-2 | Wikipedia | exact repeat |")
    assert lines[2].startswith("| teacher | 0.000 ± 0.100 | 2.0 |")
    assert lines[3].startswith("| kda (2 seeds) | 0.450 ± 0.050 | 2.0 ± 0.0 |")
    assert lines[4].startswith("| kda, rate 0.003 | 2.000 ± 0.100 |")
    assert lines[4].endswith("| - | 9.0 | - |")
    assert blocks[3].splitlines()[3].startswith("| deltaproduct, num_householder=3, allow_neg_eigval=true |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert mixers([]) == "Nothing has been measured yet."


def test_a_table_shows_what_is_not_trained_and_which_speeds_were_shared() -> None:
    rows = [
        rule("teacher", mixer="softmax", kept=[0, 1], tokens=0),
        rule("window-all", mixer="window 201", set={"window": 201}, tokens=0),
        rule("window-kept", mixer="window 201", set={"window": 201}, kept=[0], tokens=0),
        rule("kda-all-s0", runs_at_once=1),
        rule("kda-kept-s0", kept=[0], runs_at_once=4, train_tokens_per_s=1000),
    ]
    _, whole, _, kept, note = mixers(rows).split("\n\n")
    names = [[line.split(" | ")[0] for line in table.splitlines()[2:]] for table in (whole, kept)]
    assert names == [["| teacher", "| window 201, not trained", "| kda"]] * 2
    assert "†" not in whole
    assert kept.splitlines()[-1].endswith("| 1,000 † | 9.0 † | - |")
    assert note == "† 4 runs shared the GPU."


class Counting(nn.Module):
    """Predicts token t + 1 after token t with probability `sure`, the rest spread evenly."""

    device = torch.device("cpu")

    def __init__(self, sure: float, vocabulary: int = 50) -> None:
        super().__init__()
        self.sure, self.vocabulary, self.config = sure, vocabulary, PreTrainedConfig(vocab_size=vocabulary)

    def forward(self, ids: torch.Tensor, use_cache: bool, logits_to_keep: int | torch.Tensor) -> object:
        probs = torch.full((*ids.shape, self.vocabulary), (1 - self.sure) / (self.vocabulary - 1))
        probs.scatter_(-1, ((ids + 1) % self.vocabulary).unsqueeze(-1), self.sure)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=probs.log()[:, kept])


def test_measures_of_a_model_that_is_known() -> None:
    doubtful: Any = Counting(0.5)
    counting = np.arange(5000) % 50
    texts = {"wt2": Text(windows(counting, 1024, 3), compared=False), "repeat": repeated(windows(counting, 256, 3))}
    texts["heldwiki"] = Text(windows(counting, 1024, 3))
    found = measure(doubtful, Settings(texts, Counting(0.9))).clusters
    assert found["loss_wt2"].perplexity.value == pytest.approx(2.0, rel=1e-5)
    assert found["loss_wt2"].perplexity.stderr == pytest.approx(0.0, abs=1e-5)
    kl = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert found["kl_heldwiki"].score.value == pytest.approx(kl, rel=1e-4)
    assert "kl_wt2" not in found
    # The first token of the second copy is scored too, and it is not the last token of the first copy plus one.
    odd = math.log((1 - 0.5) / 49)
    expected = math.exp(-(255 * math.log(0.5) + odd) / 256)
    assert found["loss_repeat"].perplexity.value == pytest.approx(expected, rel=1e-4)


def test_rows_of_a_run_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for row in ({"run": "a", "tokens": 1}, {"run": "b", "tokens": 2}, {"run": "a", "tokens": 3}):
        RowFile(path).add(row)
    assert json.loads(path.read_text()) == [{"run": "b", "tokens": 2}, {"run": "a", "tokens": 3}]
