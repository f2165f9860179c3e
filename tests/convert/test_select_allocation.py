"""Budgets in bytes: kept heads and windows that are planned together, what they take, and what is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from deltanet_convert.options import ConvertOptions
from deltanet_convert.select import allocation, for_convert, read_selection, run
from deltanet_convert.select.allocation import PATIENCE, Allocation, _Measure, best_of, is_done, sharing_copy
from deltanet_convert.select.budget import Budget
from deltanet_convert.select.cache_sizes import CacheSizes
from deltanet_convert.select.command import select_command
from deltanet_convert.select.journal import SelectionJournal
from deltanet_convert.select.scoring import Scorer
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.select.selection_file import file_selection
from deltanet_convert.select.spending import SHORTEST, Spending
from deltanet_convert.select.switchable import SwitchableModel
from deltanet_convert.select.units import Candidates
from deltanet_convert.select.window_shares import PASSES, cheapest, window_shares
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.restrict import restrict_heads
from support.far_model import FAR_HEAD, FAR_LAYER
from support.tiny_conversion import opened, teacher_folder, tiny_conversion, tiny_job
from support.tiny_selection import QUICK, Killed, selection_file, tiny_selection, tiny_task

pytestmark = pytest.mark.usefixtures("short_selection", "quick_fit")

BUDGET, AT = "14%@512", 512


def sizes_of(teacher: Path, unit: str = "kv_head", at: int = AT, bits: int = 4, mixer: str = "window") -> CacheSizes:
    found = opened(teacher)
    kind = ConvertOptions(mixer=mixer).table(found.num_layers, ()).only_kind
    return CacheSizes(found, Candidates.of(found.config, unit), at, bits, kind)


STATES = "gated_deltanet+window"


@pytest.mark.parametrize(
    ("mixer", "bits", "budget"), [("window", 16, "50%@512"), ("window", 4, BUDGET), (STATES, 4, BUDGET)]
)
def test_bytes_of_a_plan_are_bytes_of_the_cache(far: Path, tmp_path: Path, mixer: str, bits: int, budget: str) -> None:
    out = tmp_path / "s.json"
    found = tiny_selection(far, out, budget, mixer, cache_bits=bits)
    assert (FAR_LAYER, FAR_HEAD) in found.kept
    taken = next(
        step
        for step in found.scores["allocations"]
        if (step["kept"], step["windows"]) == (len(found.kept), [*found.planned_windows])
    )
    assert taken["score"] < 0.01
    tiny_conversion(far, tmp_path / "out", layers=str(out), mixer=mixer, cache_bits=bits)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sequence_bytes(model, AT) == taken["nbytes"]
    spending = tiny_task(far, budget, mixer, cache_bits=bits).spending
    assert all(step["nbytes"] <= spending.allowed for step in found.scores["allocations"])
    alike = spending.windows(found.kept, [1.0] * 4)
    assert spending.sizes.total(found.kept, [window + 32 for window in alike]) > spending.allowed
    assert spending.sizes.total(found.kept, [2 * window for window in found.planned_windows]) > spending.allowed


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_bytes_with_sliding_windows_of_the_family(family: str, bits: int, tmp_path: Path) -> None:
    teacher = teacher_folder(tmp_path / "teacher", family)
    sizes, kept = sizes_of(teacher, at=120, bits=bits), ((1, 0),)
    file = selection_file(
        tmp_path, model_type=family, planned_windows=(33,) * 4, local=sizes.candidates.local, kept=kept
    )
    job = tiny_job(teacher, tmp_path / "out", layers=file, mixer="window", cache_bits=bits)
    assert sizes.total(kept, [33] * 4) == sum(layer.cache_bytes(120) for layer in job.plan.layers)
    assert sizes.teacher_bytes == sum(layer.kv_bytes(120) for layer in job.plan.layers)


def test_the_file_of_a_plan(far: Path, tmp_path: Path) -> None:
    config = opened(far).config
    file = selection_file(tmp_path, planned_windows=(97, 97, 33, 97))
    found = file_selection(file, config)
    assert (found.kept, found.planned_windows) == ((), (97, 97, 33, 97))
    assert json.loads(Path(file).read_text())["format"] == "deltanet-hf selection 3"
    options = {"layers": file, "mixer": "window"}
    table = tiny_job(far, tmp_path / "out", **options).table
    assert table.layers == ("local_97", "local_97", "local_33", "local_97")
    assert {name: kind.settings.window for name, kind in table.kinds.items()} == {"local_97": 97, "local_33": 33}
    changed = tiny_job(far, tmp_path / "out", **options, changes=("window=65",)).table.only_kind
    assert changed.settings.window == 65
    with_states = tiny_job(far, tmp_path / "out", layers=file, mixer="gated_deltanet+window").table
    assert [with_states[layer].settings.window for layer in range(4)] == [97, 97, 33, 97]
    file = selection_file(tmp_path, planned_windows=(97, 97, 33, 97), kept=((2, 1),))
    mixed = tiny_job(far, tmp_path / "out", layers=file, mixer="gated_deltanet+window").table[2]
    assert (mixed.settings.heads, mixed.settings.linear.window) == (("linear", "softmax"), 33)
    file = selection_file(tmp_path, planned_windows=(97, 33, 97, 97), kept=(0, 3), unit="layer")
    assert tiny_job(far, tmp_path / "out", **options).table.layers == ("softmax", "local_33", "local_97", "softmax")
    for windows in ([97, 33, 97], [97, 33, 97, 0], None, 97):
        value = json.loads(Path(file).read_text()) | {"planned_windows": windows}
        Path(file).write_text(json.dumps(value))
        with pytest.raises(UserError, match="planned_windows'"):
            read_selection(Path(file))


def test_units_are_heads_where_heads_part(far: Path, tmp_path: Path) -> None:
    assert tiny_task(far, BUDGET).options.unit == "kv_head"
    assert tiny_task(far, BUDGET, unit="layer").options.unit == "layer"
    assert tiny_task(far, "1").options.unit == "layer"
    assert tiny_task(far, BUDGET, mixer="retention").options.unit == "layer"
    assert tiny_task(far, "14%@2k", method="uniform").options.unit == "layer"
    olmo = teacher_folder(tmp_path / "olmo", "olmo2")
    assert tiny_task(olmo, "14%@2k").options.unit == "layer"


@pytest.mark.parametrize("mixer", ["window", STATES])
def test_the_smallest_budget_is_named_and_works(far: Path, mixer: str) -> None:
    sizes = sizes_of(far, mixer=mixer)
    with pytest.raises(UserError, match="the smallest budget is --keep ") as caught:
        Spending(Budget.parse("1KB@512"), sizes)
    named = re.search(r"--keep ((\d+)KB@512), a window of 33 tokens in all heads$", str(caught.value))
    spending = Spending(Budget.parse(named[1]), sizes)
    assert spending.counts() == [0]
    assert spending.windows((), [1.0] * 4) == (SHORTEST,) * 4
    assert spending.windows(((0, 0),), [1.0] * 4) is None
    further = Spending(Budget.parse("14%@8k"), sizes_of(far, at=8192, mixer=mixer))
    assert further.in_groups(10**6) == 513  # the teacher has 512 positions
    with pytest.raises(UserError, match="too few bytes"):
        Spending(Budget.parse(f"{int(named[2]) - 1}KB@512"), sizes)


def test_the_teacher_itself_is_an_answer(far: Path, tmp_path: Path) -> None:
    whole = sizes_of(far).total(Candidates.of(opened(far).config, "kv_head").units, [SHORTEST] * 4)
    enough, less = f"{-(-whole // 1000)}KB@512", f"{whole // 1000 - 1}KB@512"
    for mixer in ("window", "gated_deltanet+window"):
        with pytest.raises(UserError, match=r"in 4 bits, .* keep every layer: .* convert TEACHER OUT --keep every:1"):
            tiny_task(far, enough, mixer=mixer)
    tiny_task(far, less)
    tiny_task(far, enough, cache_bits=16)
    assert list(tmp_path.iterdir()) == []


def test_the_cheapest_allocation_is_taken() -> None:
    def row(kept: int, kl: float, score: float | None) -> Allocation:
        return Allocation(kept, (100,), 1000, kl, score)

    uniform = row(0, 0.04, 0.8)
    rows = [uniform, row(3, 0.03, 0.4), row(6, 0.035, 0.2), row(9, 0.04, 0.2), row(12, 0.08, 0.1)]
    assert uniform.cost(uniform) == 2.0
    assert best_of(rows) is rows[2]
    assert [is_done(rows[:count]) for count in range(1, 6)] == [False, False, False, False, True]
    assert is_done([uniform, rows[4], rows[4]])
    assert PATIENCE == 2
    assert best_of([row(0, 0.04, None), row(3, 0.03, None)]).kept == 3
    assert best_of([row(0, 0.04, 0.0), row(3, 0.03, 0.001)]).kept == 3  # nothing is lost: the KL divergence decides


def test_windows_are_shared_twice_from_the_best_so_far(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large steps, then in small ones; each pass is measured, and the cheapest allocation is taken. A run that was
    interrupted between them goes on with the second."""
    passes: list[Any] = []
    answers = [[4.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.4]]

    def shares_of(spending: Any, kept: Any, windows: Any, shares: Any, text_changes: Any) -> list[float]:
        passes.append((len(kept), windows, shares))
        return answers[len(passes) - 1]

    loss = lambda self, kept, windows: ((1 + abs(len(kept) - 5)) / len(set(windows)), None)  # noqa: E731
    monkeypatch.setattr(_Measure, "__call__", loss)
    monkeypatch.setattr(allocation, "window_shares", shares_of)
    found = tiny_selection(far, tmp_path / "s.json", BUDGET)
    rows = [Allocation.from_json(row) for row in found.scores["allocations"]]
    before = best_of(rows[:-2]), best_of(rows[:-1])  # of each pass
    shares = (1.0, 0.25, 0.5, 2.0, 4.0), (1.0, 0.7, 1.4)
    assert passes == [(row.kept, row.windows, some) for row, some in zip(before, shares, strict=True)]
    spending = tiny_task(far, BUDGET).spending
    for row, base, answer in zip(rows[-2:], before, answers, strict=True):
        ratios = [share * window / min(base.windows) for share, window in zip(answer, base.windows, strict=True)]
        assert row.kept == base.kept
        assert row.windows == spending.windows(found.order[: base.kept], ratios) != base.windows
    assert (len(found.kept), found.planned_windows) == (rows[-1].kept, rows[-1].windows)
    passes.pop()
    made, again = [], []
    monkeypatch.setattr(_Measure, "__init__", lambda *given: made.append(given[-2:]))
    unused: Any = None
    orders = lambda count: list(found.order[:count])  # noqa: E731
    allocation.allocations(tiny_task(far, BUDGET), unused, unused, orders, [rows[0], rows[-2]], again.append)
    assert again == rows[-1:]
    assert made == [(AT, 4)]  # tokens of a text, and bits


@pytest.mark.parametrize("method", ["forward", "kl"])
def test_finished_allocations_are_not_repeated(far: Path, tmp_path: Path, method: str) -> None:
    whole = tiny_selection(far, tmp_path / "whole.json", BUDGET, method=method)
    out = tmp_path / "s.json"
    done = SelectionJournal.allocated

    def dies(self: SelectionJournal, found: Allocation) -> None:
        done(self, found)
        if found.kept == 1:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelectionJournal, "allocated", dies)
        with pytest.raises(Killed):
            tiny_selection(far, out, BUDGET, method=method)
    steps = [json.loads(line).get("step") for line in SelectionJournal.path_of(out).read_text().splitlines()][1:]
    assert steps == ["references", "allocation 0", "round 1", "allocation 1"]
    lines: list[str | None] = []
    run.run_selection(tiny_task(far, BUDGET, method=method), out, lambda done, total, line: lines.append(line))
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    alike = [line for line in lines if line and re.match(r"\d whole, windows of \d+ tokens", line)]
    assert alike[0].startswith("2 whole")
    assert not any(line.startswith(("0 whole", "1 whole")) for line in alike)
    assert (whole.scores["allocations"][0]["score"] is None) == (method == "kl")


def test_the_command_prints_what_heads_get(far: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {key: value for key, value in QUICK.items() if key != "sinks"}
    select_command(str(far), out=tmp_path / "s.json", keep="14%@512", **given)
    printed = " ".join(capsys.readouterr().out.split())
    selection = read_selection(tmp_path / "s.json")
    assert selection.settings["kind"]["mixer"] == "gated_deltanet"  # as plain `convert`
    windows = selection.planned_windows
    assert "measured on texts of 512 tokens" in printed
    assert "all others see the first 4 and the last " in printed
    for layer, window in enumerate(windows):
        assert re.search(rf"\b{window:,} in layers (\d, )*{layer}[,;.]", printed)
    assert ", and have a state of what has left their window." in printed
    assert re.search(r"At 512 tokens a sequence takes \d+\.\d kB, the teacher's 1\.0 MB", printed)


def test_convert_plans_windows(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_convert, "SelectOptions", lambda **kw: SelectOptions(**{**QUICK, **kw}))
    options = {"layers": f"auto:{BUDGET}", "mixer": "window", "cache_bits": 4}
    out = tmp_path / "out"
    report = tiny_conversion(far, out, **options)
    table = json.loads((out / "config.json").read_text())["deltanet"]
    windows = report["selection"]["planned_windows"]
    assert [table["kinds"][name]["window"] for name in table["layers"]] == windows
    assert tiny_conversion(far, out, **options, resume=True) == report
    with pytest.raises(UserError, match="leave out --set window"):
        tiny_job(far, tmp_path / "other", **options, changes=("window=65",))
    with pytest.raises(UserError, match="--keep 90%@512: holds the teacher's own cache"):
        tiny_job(far, tmp_path / "other", **{**options, "layers": "auto:90%@512"})


def test_windows_are_shared_by_price() -> None:
    rng = random.Random(0)
    sizes = [[-3, -2, 0, 4, 12], [-6, -4, 0, 8, 24], [0, 0, 0, 0, 0], [-3, -2, 0, 4, 12]]
    for allowed in (0, 5, 40):
        losses = [sorted((rng.random() for _ in range(5)), reverse=True) for _ in sizes]
        found = cheapest(losses, sizes, allowed)
        used, lost = (sum(row[place] for row, place in zip(rows, found, strict=True)) for rows in (sizes, losses))
        every = itertools.product(range(5), repeat=len(sizes))
        least = min(
            sum(row[place] for row, place in zip(losses, places, strict=True))
            for places in every
            if sum(row[place] for row, place in zip(sizes, places, strict=True)) <= used
        )
        assert used <= allowed
        assert lost == least


def test_a_layer_that_looks_far_gets_the_long_window(far: Path, tmp_path: Path) -> None:
    """No head is kept, so only a longer window of the one layer that looks far keeps what it finds."""
    task = tiny_task(far, BUDGET)
    alike = task.spending.windows((), [1.0] * 4)

    def text_changes(others: Sequence[Sequence[int]]) -> list[float]:
        return [1 / windows[FAR_LAYER] - 1 / alike[FAR_LAYER] for windows in others]

    shares = window_shares(task.spending, (), alike, PASSES[0], text_changes)
    windows = task.spending.windows((), shares)
    assert windows[FAR_LAYER] > max(alike) > min(windows)
    kept = tuple((FAR_LAYER, head) for head in range(2))  # whose window is nobody's
    shares = window_shares(task.spending, kept, alike, PASSES[0], text_changes)
    assert shares[FAR_LAYER] == 1.0
    assert task.spending.sizes.total((), windows) <= task.spending.allowed
    shares = window_shares(task.spending, (), alike, PASSES[0], lambda others: [-float(sum(some)) for some in others])
    windows = tuple(task.spending.in_groups(share * window) for share, window in zip(shares, alike, strict=True))
    assert task.spending.sizes.total((), windows) <= task.spending.allowed


@pytest.mark.parametrize("bits", [16, 4])
@torch.no_grad()
def test_other_windows_are_measured_from_their_layer_on(far: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As complete models in these bits are, on every 8th of the last tokens."""
    monkeypatch.setattr(allocation, "POSITIONS", 160)
    task = tiny_task(far, BUDGET)
    loaded = task.teacher.load_weights(torch.device("cpu"), torch.float32)
    shares: list[float] = []
    scorer = Scorer(SwitchableModel(sharing_copy(loaded), task.candidates, 6, 1), shares.append)
    measure = _Measure(task, loaded, scorer, 256, bits)
    kept, windows = ((FAR_LAYER, 1 - FAR_HEAD),), (33, 33, 33, 33)
    others = [(65, 33, 33, 33), (33, 129, 33, 33), (33, 33, 129, 33), (33, 33, 33, 65), (33, 33, 193, 65)]
    found, (before, _) = measure.text_changes(kept, windows, others), measure(kept, windows)
    assert found == [pytest.approx(measure(kept, other)[0] - before, rel=1e-5, abs=1e-7) for other in others]
    assert len(set(found)) > 1
    assert shares[-1] == 1.0
    restricted = restrict_heads(sharing_copy(loaded), {FAR_LAYER: [1 - FAR_HEAD]}, windows, 4)
    models = loaded, set_cache_bits(restricted, bits)
    want, got = (model(measure.text.ids).logits[:, -160::8].flatten(0, 1).log_softmax(-1) for model in models)
    kl = F.kl_div(got, want, log_target=True, reduction="batchmean")
    assert measure(kept, windows)[0] == pytest.approx(float(kl), rel=1e-3)


def test_by_derivatives_each_layer_changes_once_at_a_time(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny_task(far, BUDGET, method="gradient")
    loaded = task.teacher.load_weights(torch.device("cpu"), torch.float32)
    measure = _Measure(task, loaded, Scorer(SwitchableModel(sharing_copy(loaded), task.candidates, 6, 1)), 256, 4)
    calls: list[Sequence[int]] = []

    def gradients(self: Scorer, objective: Any, gates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert (gates == 0.5).all()
        assert self.model.windows == windows
        assert self.model.full.nonzero().tolist() == [[FAR_LAYER, 0]]
        calls.append(self.model.others or ())
        return torch.arange(8.0).view(4, 2) + 100 * len(calls)  # [L, KV]

    monkeypatch.setattr(Scorer, "gradients", gradients)
    windows = (33, 65, 33, 33)
    others = [(97, 65, 33, 33), (129, 65, 33, 33), (33, 33, 33, 33), (33, 129, 33, 33), (33, 65, 33, 97)]
    found = measure.text_changes(((FAR_LAYER, 0),), windows, others)
    assert [list(row) for row in calls] == [[97, 129, 33, 97], [129, 33, 33, 97]]
    assert found == [201.0, 401.0, 405.0, 205.0, 413.0]
    assert measure(((FAR_LAYER, FAR_HEAD),), windows)[1] is None
