"""Rows of hybrids: a teacher against itself, a student beside training-free baselines, and figures that are shared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from deltanet_convert.select import Selection
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from deltanet_hf.evaluation.training_free import WindowPolicy
from deltanet_hf.models.cache_bits import set_cache_bits, stored_bytes
from deltanet_hf.models.restrict import restrict_heads
from measuring.eviction import __main__ as eviction
from measuring.eviction import gates
from measuring.eviction.gates import Heads
from measuring.study import front, hybrid_measure, hybrid_row, recall_cells, state_rows, task_suites
from measuring.study.hybrid_measure import HybridMeasure
from measuring.study.model_facts import load_for_measure
from measuring.study.task_suites import TaskSuites
from support.tiny_models import tiny_mixture, tiny_table, tiny_teacher
from tests.evaluation.conftest import VOCABULARY, random_arrays

TEXTS = {"wt2": ("wt2", 64, 3), "1k": ("heldwiki", 64, 3), "wiki_4k": ("wiki_long", 200, 3), "4k": ("novels", 200, 3)}


@pytest.fixture
def small(short_cells: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows."""
    monkeypatch.setattr(hybrid_measure, "TEXTS", TEXTS)
    monkeypatch.setattr(hybrid_measure, "SEGMENT", 16)
    monkeypatch.setattr(hybrid_measure, "SEGMENTS", 4)
    monkeypatch.setattr(hybrid_measure, "BYTES_AT", 128)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    random_arrays(folder, "wt2", "heldwiki", "wiki_long", "novels")
    return folder


def plan_of(kept: tuple[tuple[int, int], ...], windows: tuple[int, ...]) -> Selection:
    """A selection for a budget in bytes, which windows of 129 tokens would take too."""
    facts: dict[str, Any] = {"teacher": "T", "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2}
    facts |= {"unit": "kv_head", "method": "forward", "budget": "1MB@2k", "seed": 0, "settings": {"cache_bits": 4}}
    scores = {"allocations": [{"windows": [129] * 4}, {"windows": list(windows)}]}
    return Selection(**facts, kept=kept, order=kept, scores=scores, planned_windows=windows)


def test_a_plan_is_measured_beside_windows_of_its_budget(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """In its bits, as the teacher is in those that are asked for."""
    monkeypatch.setattr(front, "LENGTHS", {"mb_2k": 50, "mb_8k": 130, "mb_32k": 300})
    monkeypatch.setattr(recall_cells, "CELLS", {"pairs_8": recall_cells.CELLS["pairs_8"]})
    kept = ((0, 1), (2, 0), (2, 1))
    (tmp_path / "plan.json").write_text(json.dumps(plan_of(kept, (33, 33, 65, 33)).to_json()))
    out = tmp_path / "rows.json"
    front.main(arrays, out, str(teacher_folder), teacher_bits=[16, 8], plan=[tmp_path / "plan.json"])
    rows = {row["run"]: row for row in json.loads(out.read_text())}
    planned, windows = rows["plan-1MB@2k"], rows["windows-1MB@2k"]
    assert (planned["kept_heads"], planned["bits"]) == ([list(head) for head in kept], 4)
    assert planned["windows"] == [33, 33, 65, 33]
    assert (windows["kept"], windows["window"]) == ([], 129)
    assert "kept_heads" not in windows
    assert planned["kl_4k"] != windows["kl_4k"]
    assert planned["command"].endswith("--plan plan.json")
    teacher = load_for_measure(str(teacher_folder), torch.device("cpu"))
    whole = WindowPolicy((), None)
    for row, policy, bits in (
        (planned, WindowPolicy((), 65, heads=kept, windows=(33, 33, 65, 33)), 4),
        (windows, WindowPolicy((), 129), 4),
        (rows["teacher@8"], whole, 8),
        (rows["teacher@16"], whole, 16),
    ):
        model = set_cache_bits(policy.apply(teacher), bits)
        assert row["kl_1k"] == pytest.approx(divergence(teacher, arrays, model), rel=1e-3, abs=1e-5)
        for column, tokens in front.LENGTHS.items():
            assert row[column] == round(sequence_bytes(model, tokens) / 1e6, 3)


def test_models_and_policies_of_the_front_have_the_bits_that_are_asked_for(
    small: None, arrays: Path, teacher_folder: Path, student_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(front, "LENGTHS", {"mb_2k": 130})
    monkeypatch.setattr(recall_cells, "CELLS", {"pairs_8": recall_cells.CELLS["pairs_8"]})
    monkeypatch.setattr(
        front, "run_facts", lambda folder: {"tokens": 512, "seed": 3} if folder.name == "trained" else {}
    )
    table = tiny_table(layers=(0,), mixer="window", window=9)
    local = tiny_mixture("llama", table, vocab_size=VOCABULARY, max_position_embeddings=2048)
    for name in ("local", "trained"):
        local.save_pretrained(tmp_path / name)
    shutil.copytree(student_folder, tmp_path / "hybrid" / "trained")
    folders = {"local": "local", "control": "trained", "student": "hybrid/trained"}
    models = [f"{name}={tmp_path / folder}" for name, folder in folders.items()]
    out, budget = tmp_path / "rows.json", 16_000
    front.main(arrays, out, str(teacher_folder), policy=[f"1@4@{budget}@130"], model=models, bits=[4])
    rows = {row["run"]: row for row in json.loads(out.read_text())}
    teacher = load_for_measure(str(teacher_folder), torch.device("cpu"))
    kinds = {"local@4": ("free", 0), "control@4": ("control", 512), "student@4": ("student", 512)}
    assert {run: (rows[run]["kind"], rows[run]["tokens"]) for run in kinds} == kinds
    assert rows["student@4"]["cells"]["pairs_8"].keys() >= {"exact", "first", "nats", "control"}
    for name, folder in folders.items():
        model = set_cache_bits(load_for_measure(str(tmp_path / folder), torch.device("cpu")), 4)
        assert rows[f"{name}@4"]["kl_1k"] == pytest.approx(divergence(teacher, arrays, model), rel=1e-3)
        assert rows[f"{name}@4"]["mb_2k"] == round(sequence_bytes(model, 130) / 1e6, 3)
    window = rows[f"free-1@4@{budget}@130"]["window"]
    sizes = [
        sequence_bytes(set_cache_bits(WindowPolicy((1,), tokens).apply(teacher), 4), 130)
        for tokens in (window, window + 1)
    ]
    assert sizes[0] <= budget < sizes[1]


@torch.no_grad()
def divergences(teacher: Any, windows: np.ndarray, model: Any) -> torch.Tensor:
    """KL of a model from the teacher [N, T - 1], in nats, on windows [N, T]."""
    ids = torch.from_numpy(windows.astype(np.int64))
    wanted, found = (each(ids).logits[:, :-1].log_softmax(-1) for each in (teacher, model))
    return (wanted.exp() * (wanted - found)).sum(-1)


def divergence(teacher: Any, arrays: Path, model: Any) -> float:
    """KL of a model from the teacher, in nats per token, on three windows of 64 tokens."""
    windows = np.load(arrays / "heldwiki.npy")[: 31 * 64].reshape(31, 64)
    return float(divergences(teacher, windows[[0, 15, 30]], model).mean())


def test_runs_share_figures(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall_cells, "CELLS", {"pairs_8": recall_cells.CELLS["pairs_8"]})
    folder = tmp_path / "references"

    def add(out: str, **options: Any) -> None:
        front.main(arrays, tmp_path / out, str(teacher_folder), teacher_bits=[16], **options)

    add("a.json")
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(stamps) == 2  # teacher and control
    calls: list[Any] = []
    measure = hybrid_measure.HybridMeasure.__call__
    monkeypatch.setattr(
        hybrid_measure.HybridMeasure, "__call__", lambda self, model: calls.append(model) or measure(self, model)
    )
    add("b.json")
    assert len(calls) == 1  # of the row only
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    add("c.json", limit=2)
    assert len(list(folder.iterdir())) == 4  # other windows and probes are other figures


def test_a_row_of_the_front_with_suites(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(task_suites, "LENGTHS", {})  # RULER, whose texts are long
    rows = [{"text": f"The {n}th river is called", "value": "Nile"} for n in range(4)]
    (tmp_path / "squad_completion").mkdir()
    (tmp_path / "squad_completion/validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "front.json"
    front.main(arrays, out, str(teacher_folder), teacher_bits=[4], tasks=tmp_path)
    (row,) = json.loads(out.read_text())
    items = front.load_items(out)["teacher@4"]
    assert (row["run"], row["kind"], row["bits"], row["ifeval"]) == ("teacher@4", "teacher", 4, None)
    assert row["missing"]["ifeval"] == "no ifeval/train.jsonl"
    assert "completion" not in row["missing"]
    for column in ("completion", "top1"):
        score = items.clusters[hybrid_row.SHARES[column]].score
        assert row[column] == pytest.approx(100 * score.value, abs=1e-3)
        assert row[f"{column}_se"] == pytest.approx(100 * score.stderr, abs=1e-3)
    assert 0 < row["top1"] <= 100
    assert "--tasks" in row["command"]
    better = {**items.clusters, "completion": Clusters(np.ones(4) + items.clusters["completion"].sums, np.ones(4))}
    assert hybrid_row.compared(Measured(0, better), items) == {"better": ["completion"], "worse": []}
    without = {name: part for name, part in items.clusters.items() if name != "completion"}
    assert hybrid_row.compared(Measured(0, better), Measured(0, without)) == {"better": [], "worse": []}


def test_rows_of_states_with_a_suite(
    arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first and the last of so many windows, in the bits that are asked for."""
    pytest.importorskip("lm_eval")
    sizes = {"1k": 64, "4k": 100, "8k": 200}
    monkeypatch.setattr(state_rows, "TEXTS", {name: ("novels", size, 3) for name, size in sizes.items()})
    cell = recall_cells.CELLS["needles_1k"][0]
    monkeypatch.setattr(recall_cells, "CELLS", dict.fromkeys(state_rows.FACTS, (cell, 420, 3)))
    monkeypatch.setattr(recall_cells, "LONG", {})
    monkeypatch.setattr(
        state_rows, "run_facts", lambda folder: {"tokens": 512, "seed": 3} if folder.name == "local" else {}
    )
    rows = [{"text": f"The {n}th river is called", "value": "Nile"} for n in range(3)]
    (tmp_path / "squad_completion").mkdir()
    (tmp_path / "squad_completion/validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(TaskSuites, "__call__", lambda *_: {"completion": Clusters(np.array([1.0, 0, 1]), np.ones(3))})
    out, teacher, local = tmp_path / "rows.json", str(teacher_folder), tmp_path / "local"
    table = tiny_table(layers=(0,), mixer="window", window=9)
    tiny_mixture("llama", table, vocab_size=VOCABULARY, max_position_embeddings=2048).save_pretrained(local)
    models = [f"itself={teacher}", f"local={local}"]
    state_rows.main(arrays, out, teacher, models, bits=4, limit=2, tasks=tmp_path, column=["completion"])
    itself, row = json.loads(out.read_text())
    assert (row["completion"], row["stderr"]["completion"]) == (66.7, 33.3)
    assert [(one["tokens"], one["seed"], one["bits"]) for one in (itself, row)] == [(0, None, 4), (512, 3, 4)]
    whole, tokens = load_for_measure(teacher, torch.device("cpu")), np.load(arrays / "novels.npy")
    for one, folder in ((itself, teacher), (row, str(local))):
        model = set_cache_bits(load_for_measure(folder, torch.device("cpu")), 4)
        assert [one["mb_2k"], one["mb_32k"]] == [round(stored_bytes(model, n, 4) / 1e6, 3) for n in (2048, 32768)]
        for name, size in sizes.items():
            windows = tokens[: len(tokens) // size * size].reshape(-1, size)
            kl = divergences(whole, windows[[0, -1]], model)
            assert one[f"kl_{name}"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-5)
        assert one["kl_8k_last_quarter"] == pytest.approx(float(kl[:, -50:].mean()), rel=1e-3, abs=1e-5)
    items = front.load_items(out)["local"].clusters
    assert items["completion"].sums.tolist() == [1, 0, 1]
    assert len(items["kl_8k"].sums) == len(items["needles_2k"].sums) == 2
    assert "--limit 2 " in row["command"]
    assert "--column=completion" in row["command"]
    assert row["command"].endswith("--bits 4")
    for column, reason in (("humaneval", "needs HF_ALLOW_CODE_EVAL=1"), ("squad", "no such suite")):
        with pytest.raises(UserError, match=f"^--column {column}: {reason}$"):
            state_rows.main(arrays, out, teacher, [], tasks=tmp_path, column=[column])


def test_windows_are_spread_over_texts_of_many_parts(
    small: None, arrays: Path, teacher_folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Three of all, with the first and the last; of WikiText-2 the first three."""
    measure = HybridMeasure(arrays, load_for_measure(str(teacher_folder), torch.device("cpu")), tokenizer)
    for name, chosen in (("4k", (0, 4, 9)), ("1k", (0, 15, 30)), ("wt2", (0, 1, 2))):
        array, size, _ = TEXTS[name]
        tokens = np.load(arrays / f"{array}.npy")
        assert measure.windows[name].tolist() == [tokens[size * i : size * (i + 1)].tolist() for i in chosen]


def test_measures_survive_their_file() -> None:
    measured = Measured(7, {"a": Clusters(np.array([1.5, 2.0]), np.array([3, 4]))})
    back = Measured.from_dict(json.loads(json.dumps(measured.to_dict())))
    assert back.bytes == 7
    assert back.clusters["a"].mean == measured.clusters["a"].mean
    assert back.clusters["a"].sizes.tolist() == [3, 4]


@pytest.mark.parametrize("errors", [1.7, 2.4])
def test_columns_are_marked_from_two_standard_errors_on(errors: float) -> None:
    """Differences that vary from item to item, and are `errors` of their standard errors on average."""
    rng, count = np.random.default_rng(0), 400
    base, noise = rng.random(count), rng.standard_normal(count)
    noise = (noise - noise.mean()) / noise.std(ddof=1)
    difference = noise + errors / np.sqrt(count)

    def measured(sign: int) -> Measured:
        changes = {"kl_1k": -difference, "needles_2k": difference, "loss_repeat": difference, "pairs_8": -difference}
        values = {name: base + sign * change for name, change in changes.items()} | {"loss_wt2": base}
        return Measured(1, {name: Clusters(sums, np.ones(count)) for name, sums in values.items()})

    marks = {"better": ["kl_1k", "needles_2k"], "worse": ["pairs_8", "exact_repeat"]}
    found = hybrid_row.compared(measured(1), measured(0))
    assert found == (marks if errors > 2 else {"better": [], "worse": []})
    assert hybrid_row.compared(measured(0), measured(1)) == dict(zip(found, reversed(found.values()), strict=True))


def test_kinds_of_mixed_heads() -> None:
    facts = hybrid_row.layer_facts(restrict_heads(tiny_teacher("llama"), {0: [0, 1], 2: [1]}, 5, 2))
    assert facts == {"kinds": {"softmax": 1, "window 5": 2, "mixed_heads": 1}, "kept": [0], "kept_heads": [[2, 1]]}


def test_a_row_of_learned_eviction(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, and gates in the whole heads of a plan alone."""
    monkeypatch.setattr(recall_cells, "CELLS", {"pairs_8": recall_cells.CELLS["pairs_8"]})
    monkeypatch.setattr(gates, "WINDOW", 40)
    np.save(tmp_path / "text.npy", np.random.default_rng(9).integers(5, 60, 1000).astype(np.uint16))
    plan, kept = tmp_path / "plan.json", ((0, 1), (2, 0), (2, 1))
    plan.write_text(json.dumps(plan_of(kept, (33, 33, 65, 33)).to_json()))
    options: dict[str, Any] = {"tokens": 512, "length": 128, "batch": 256, "limit": 2}
    out, given = tmp_path / "rows.json", (str(teacher_folder), tmp_path / "text.npy")
    eviction.main(arrays, out, *given, "25%", plan, 1e-3, **options)
    (row,) = json.loads(out.read_text())
    assert (row["run"], row["kind"], row["bits"]) == ("eviction-25%-plan-lora", "eviction", 4)
    assert (row["kept_heads"], row["adapters"], row["share_target"]) == ([list(head) for head in kept], 1e-3, 0.25)
    assert 0 < row["share"] < 1
    heads = Heads.of(load_for_measure(str(teacher_folder), torch.device("cpu")).config, kept, (33, 33, 65, 33))
    assert row["mb_32k"] == pytest.approx(heads.bytes(32768, row["share"]) / 1e6, rel=1e-2)
    assert row["kl_4k"] > row["kl_1k"] > 0  # of texts of 200 and 64 tokens
    assert round(front.load_items(out)[row["run"]].bytes / 1e6, 3) == row["mb_2k"]
    with pytest.raises(UserError, match=r"^--text \S+: has 1,000 tokens, and 2,048 are trained on; lower --tokens$"):
        eviction.main(arrays, out, *given, "25%", **{**options, "tokens": 2048})
    with pytest.raises(UserError, match=r"^--keep 3: expected a share of older tokens such as 25%, or bytes"):
        eviction.main(arrays, out, *given, "3", **options)
