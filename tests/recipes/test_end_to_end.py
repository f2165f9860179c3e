"""The benchmark of reading and decoding: order, rows, resumption, errors, and the end of its time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from deltanet_convert.select import read_selection
from deltanet_convert.select.for_convert import SHIPPED
from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.evaluation.measures.decoding_mode import EAGER, MODES, MOST_STEPS
from deltanet_hf.evaluation.speed.check_decoding import check_decoding
from deltanet_hf.evaluation.speed.random_models import PLANNED, SHAPES
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from measuring import rows as row_files
from measuring.benchmarks import end_to_end, model_at_points
from measuring.benchmarks.end_to_end import KINDS, benchmark
from measuring.benchmarks.model_at_points import ModelAtPoints
from support.replayed_step import EmulatedCapture
from support.tiny_models import TINY_SHAPE, tiny_teacher


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "135M", TINY_SHAPE)
    monkeypatch.setattr(end_to_end, "POINTS", [(1, 16), (2, 24)])
    monkeypatch.setattr(model_at_points, "STEPS", {"eager": 2})
    monkeypatch.setattr(model_at_points, "MOST_STEPS", 8)
    for place in (end_to_end, model_at_points):
        monkeypatch.setattr(place, "free_memory", lambda: None)  # seconds of a test process full of modules
    monkeypatch.setattr(model_at_points, "check_decoding", lambda model, mode: check_decoding(model, mode, length=20))
    monkeypatch.setattr(end_to_end, "chosen_device", lambda name: torch.device("cpu"))


def options(output: Path, **changes: Any) -> argparse.Namespace:
    every = {"shapes": ["135M"], "kinds": list(KINDS), "modes": ["eager"], "minutes": None}
    return argparse.Namespace(output=output, **{**every, **changes})


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def labels(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["mode"], row["batch"], row["context"]


def counted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    before = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return before(*args, **kwargs)

    monkeypatch.setattr(place, name, call)
    return calls


def test_only_models_in_a_form_of_their_own_are_measured_by_graph() -> None:
    rows = list(end_to_end.labels(["1B"], list(KINDS), list(MODES)))
    for kind, chosen in KINDS.items():
        modes = {row["mode"] for row in rows if row["kind"] == kind}
        assert modes == ({"eager", "graph"} if chosen.served else {"eager"})
    assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_rows_and_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes share a model and its prefill, also across runs; nothing is measured twice."""
    monkeypatch.setitem(CAPTURES, "cpu", EmulatedCapture())
    models = counted(monkeypatch, end_to_end, "random_model")
    prompts = counted(monkeypatch, model_at_points, "timed_prompt")
    checks = counted(monkeypatch, model_at_points, "check_decoding")
    path = tmp_path / "new" / "rows.json"
    benchmark(options(path, modes=["eager", "graph"], kinds=["teacher", "hybrid25"]))
    rows, points = rows_of(path), [(1, 16), (2, 24)]
    assert [labels(row) for row in rows] == [
        (kind, mode, *point) for kind in ("teacher", "hybrid25") for point in points for mode in ("eager", "graph")
    ]
    keys = {"shape", "kind", "mode", "batch", "context", "prefill_tokens_per_s", "decode_ms", "cache_mb", "repeats"}
    assert all(set(row) == keys and row["decode_ms"] > 0 and row["repeats"] == 3 for row in rows)
    for eager, graph in zip(rows[::2], rows[1::2], strict=True):
        assert eager["prefill_tokens_per_s"] == graph["prefill_tokens_per_s"] > 0
        assert eager["cache_mb"] == graph["cache_mb"]
        tokens = eager["batch"] * eager["context"]
        if eager["kind"] == "teacher":  # 4 layers, 2 heads of 8 channels, keys and values, 2 bytes
            assert eager["cache_mb"] == round(tokens * 4 * 2 * 8 * 2 * 2 / 1e6, 3)
    # One run that loads kernels and three timed ones, whose cache the first mode decodes on; one for the second mode.
    assert (len(models), len(prompts), len(checks)) == (2, 2 * 2 * 5, 4)
    document = json.loads(path.read_text())
    assert document["command"] == "python -m measuring.benchmarks.end_to_end --output rows.json"

    benchmark(options(path, modes=["eager", "graph"], kinds=["teacher", "hybrid25"]))
    assert (len(models), rows_of(path)) == (2, rows)
    write = json.dumps({**document, "rows": [row for row in rows if labels(row) != ("teacher", "graph", 2, 24)]})
    path.write_text(write)
    benchmark(options(path, modes=["eager", "graph"], kinds=["teacher", "hybrid25"]))
    assert (len(models), len(prompts), len(checks)) == (3, 21, 5)
    assert sorted(map(labels, rows_of(path))) == sorted(map(labels, rows))
    assert rows_of(path)[-1]["prefill_tokens_per_s"] == rows[3]["prefill_tokens_per_s"]


def test_errors_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not measured again, and the rows behind them are measured."""
    path, failures = tmp_path / "rows.json", iter((torch.OutOfMemoryError("full"), ZeroDivisionError("lost")))

    def check(model: Any, mode: Any, *_: Any) -> float:
        if mode.name == "graph":
            raise QualityError("graph: a greedily decoded token is\n wrong")
        return 0.0

    def fill(*args: Any) -> Any:
        if (failure := next(failures)) is not None:
            raise failure
        return before(*args)

    before = model_at_points.timed_steps
    monkeypatch.setattr(model_at_points, "check_decoding", check)
    monkeypatch.setattr(model_at_points, "timed_steps", fill)
    monkeypatch.setattr(model_at_points, "DECODINGS", 1)
    chosen = options(path, modes=["eager", "graph"], kinds=["teacher"])
    benchmark(chosen)
    errors = {labels(row)[1:]: row.get("error") for row in rows_of(path)}
    wrong = "graph: a greedily decoded token is wrong"
    assert errors == {
        ("eager", 1, 16): "out of memory",
        ("graph", 1, 16): wrong,
        ("eager", 2, 24): "ZeroDivisionError: lost",
        ("graph", 2, 24): wrong,
    }
    assert not any("decode_ms" in row for row in rows_of(path))
    monkeypatch.setattr(model_at_points, "timed_steps", before)
    rows = rows_of(path)
    benchmark(chosen)
    assert rows_of(path) == rows


def test_the_time_ends_after_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, clock = tmp_path / "rows.json", [0.0]
    monkeypatch.setattr(model_at_points, "check_decoding", lambda *_: 0.0)
    monkeypatch.setattr(model_at_points, "PREFILLS", 1)
    monkeypatch.setattr(row_files.time, "monotonic", lambda: clock[0])
    models = counted(monkeypatch, end_to_end, "random_model")
    before = ModelAtPoints.measure

    def measure(*args: Any) -> dict[str, Any]:
        clock[0] += 40
        return before(*args)

    monkeypatch.setattr(ModelAtPoints, "measure", measure)
    for count, made, minutes in ((3, 2, 1.5), (3, 2, 0.0), (4, 3, 0.5), (2 * len(KINDS), len(KINDS) + 1, None)):
        benchmark(options(path, minutes=minutes))
        assert (len(rows_of(path)), len(models)) == (count, made)
        assert ("the time is over" in capsys.readouterr().out) == (minutes is not None)


@pytest.mark.parametrize(("seconds", "repeats"), [(5.0, 1), (3.0, 3)])
def test_a_slow_prefill_is_timed_once(seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_teacher("llama")
    before = model_at_points.timed_prompt
    monkeypatch.setattr(model_at_points, "check_decoding", lambda *_: 0.0)
    monkeypatch.setattr(model_at_points, "timed_prompt", lambda *args: (seconds, before(*args)[1]))
    row = ModelAtPoints(model, {}).measure(EAGER, (3, 20))
    assert (row["repeats"], row["prefill_tokens_per_s"]) == (repeats, 60 / seconds)
    cache = DynamicCache(config=model.config)
    before(EAGER, model, torch.zeros(3, 20, dtype=torch.long), cache)
    assert row["cache_mb"] == round(cache_bytes(cache) / 1e6, 3)


def test_times_are_medians_after_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt and the first run of steps, which load kernels, do not count."""
    prompts, steps = iter((60.0, 3.5, 1.0, 2.0)), iter((90.0, 0.9, 0.2, 0.4))
    prompt, decode = model_at_points.timed_prompt, model_at_points.timed_steps
    monkeypatch.setattr(model_at_points, "check_decoding", lambda *_: 0.0)
    monkeypatch.setattr(model_at_points, "timed_prompt", lambda *args: (next(prompts), prompt(*args)[1]))
    monkeypatch.setattr(model_at_points, "timed_steps", lambda *args: (next(steps), decode(*args)[1]))
    row = ModelAtPoints(tiny_teacher("llama"), {}).measure(EAGER, (3, 20))
    assert row["prefill_tokens_per_s"] == 60 / 2
    assert row["decode_ms"] == 1000 * 0.4 / 2  # runs of two steps


def test_a_step_has_room_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (1 + model_at_points.DECODINGS) * max(model_at_points.STEPS.values()) <= MOST_STEPS


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"a": 1}'):
        (tmp_path / "f.json").write_text(text)
        with pytest.raises(UserError, match=r"f.json: not a file of this command"):
            benchmark(options(tmp_path / "f.json"))


def test_windows_by_layer_are_those_of_the_shipped_plan() -> None:
    assert read_selection(SHIPPED / "smollm2-135m-instruct.json").planned_windows == PLANNED
