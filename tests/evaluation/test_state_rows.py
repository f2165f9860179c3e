"""Rows of models: a teacher against itself, a student, learned eviction, and marks of what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comparison_tables import compared
from deltanet_convert.select import Selection
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.models.cache_bits import set_cache_bits, stored_bytes
from measuring.eviction import __main__ as eviction
from measuring.eviction import gates
from measuring.eviction.gates import Heads
from measuring.study import state_rows
from measuring.study.items import load_items
from measuring.study.model_facts import load_for_measure
from measuring.study.task_suites import TaskSuites
from support.tiny_models import tiny_mixture, tiny_table
from tests.evaluation.conftest import VOCABULARY, random_arrays


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    random_arrays(folder, "heldwiki", "novels")
    return folder


def plan_of(kept: tuple[tuple[int, int], ...], windows: tuple[int, ...]) -> Selection:
    """A selection for a budget in bytes, which windows of 129 tokens would take too."""
    facts: dict[str, Any] = {"teacher": "T", "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2}
    facts |= {"unit": "kv_head", "method": "forward", "budget": "1MB@2k", "seed": 0, "settings": {"cache_bits": 4}}
    scores = {"allocations": [{"windows": [129] * 4}, {"windows": list(windows)}]}
    return Selection(**facts, kept=kept, order=kept, scores=scores, planned_windows=windows)


@torch.no_grad()
def divergences(teacher: Any, windows: np.ndarray, model: Any) -> torch.Tensor:
    """KL of a model from the teacher [N, T - 1], in nats, on windows [N, T]."""
    ids = torch.from_numpy(windows.astype(np.int64))
    wanted, found = (each(ids).logits[:, :-1].log_softmax(-1) for each in (teacher, model))
    return (wanted.exp() * (wanted - found)).sum(-1)


SIZES = {"1k": 64, "4k": 100, "8k": 200}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts, three of each."""
    monkeypatch.setattr(state_rows, "TEXTS", {name: ("novels", size, 3) for name, size in SIZES.items()})
    monkeypatch.setattr(state_rows, "NEEDLES", {"needles_2k": (420, 3), "needles_8k": (420, 3)})
    monkeypatch.setattr(state_rows, "PROSE", {"prose_2k": (1500, 3), "prose_4k": (1500, 3)})


def test_rows_of_states_with_a_suite(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first and the last of so many windows, in the bits that are asked for."""
    pytest.importorskip("lm_eval")
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
        for name, size in SIZES.items():
            windows = tokens[: len(tokens) // size * size].reshape(-1, size)
            kl = divergences(whole, windows[[0, -1]], model)
            assert one[f"kl_{name}"] == pytest.approx(float(kl.mean()), rel=1e-3, abs=1e-5)
        assert one["kl_8k_last_quarter"] == pytest.approx(float(kl[:, -50:].mean()), rel=1e-3, abs=1e-5)
    items = load_items(out)["local"].clusters
    assert items["completion"].sums.tolist() == [1, 0, 1]
    assert len(items["kl_8k"].sums) == len(items["needles_2k"].sums) == 2
    assert "--limit 2 " in row["command"]
    assert "--column=completion" in row["command"]
    assert row["command"].endswith("--bits 4")
    for column, reason in (("humaneval", "needs HF_ALLOW_CODE_EVAL=1"), ("squad", "no such suite")):
        with pytest.raises(UserError, match=f"^--column {column}: {reason}$"):
            state_rows.main(arrays, out, teacher, [], tasks=tmp_path, column=[column])


def test_megabytes_do_not_depend_on_the_dtype_of_the_measurement(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """On a CPU models run in float32; the cache of 16 bits is meant. A folder without NAME= names its row."""
    out = tmp_path / "rows.json"
    state_rows.main(arrays, out, str(teacher_folder), [str(teacher_folder)], limit=2)
    (row,) = json.loads(out.read_text())
    assert (row["run"], row["bits"]) == ("teacher", 16)
    keys_and_values = 4 * 2 * 2 * 8 * 2  # layers, heads, channels, bytes of bfloat16
    assert row["mb_2k"] == round(2048 * keys_and_values / 1e6, 3)


def test_arrays_that_cannot_be_measured_are_refused(small: None, teacher_folder: Path, tmp_path: Path) -> None:
    for tokens, said in ((None, "no such file"), ([VOCABULARY] * 999, "of token ids below"), ([5] * 399, "400 are")):
        if tokens is not None:
            np.save(tmp_path / "novels.npy", tokens)
        with pytest.raises(UserError, match=rf"novels.npy: [^\n]*{said}"):
            state_rows.main(tmp_path, tmp_path / "rows.json", str(teacher_folder), [str(teacher_folder)])


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
    found = compared(measured(1), measured(0))
    assert found == (marks if errors > 2 else {"better": [], "worse": []})
    assert compared(measured(0), measured(1)) == dict(zip(found, reversed(found.values()), strict=True))


@pytest.mark.slow
def test_a_row_of_learned_eviction(
    small: None, arrays: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, and gates in the whole heads of a plan alone."""
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
    assert row["kl_8k"] > row["kl_1k"] > 0  # of texts of 200 and 64 tokens
    assert len(load_items(out)[row["run"]].clusters["kl_1k"].sums) == 2
    with pytest.raises(UserError, match=r"^--text \S+: has 1,000 tokens, and 2,048 are trained on; lower --tokens$"):
        eviction.main(arrays, out, *given, "25%", **{**options, "tokens": 2048})
    with pytest.raises(UserError, match=r"^--keep 3: expected a share of older tokens such as 25%, or bytes"):
        eviction.main(arrays, out, *given, "3", **options)
