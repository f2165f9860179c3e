"""The benchmark of reading and decoding: order, rows, resumption, errors, and the end of its time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltanet_convert.select import read_selection
from deltanet_convert.select.for_convert import SHIPPED
from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.evaluation.measures.decoding_mode import MODES
from deltanet_hf.evaluation.speed.check_decoding import check_decoding
from deltanet_hf.evaluation.speed.random_models import KINDS, PLANNED, SHAPES
from measuring import rows as row_files
from measuring.benchmarks import end_to_end
from measuring.benchmarks.end_to_end import benchmark
from support.replayed_step import EmulatedCapture
from support.tiny_models import TINY_SHAPE


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "135M", TINY_SHAPE)
    monkeypatch.setattr(end_to_end, "POINTS", [(1, 16), (2, 24)])
    monkeypatch.setattr(end_to_end, "STEPS", dict.fromkeys(MODES, 2))
    monkeypatch.setattr(end_to_end, "REPEATS", 1)
    monkeypatch.setattr(end_to_end.gc, "collect", lambda: None)  # seconds of a test process full of modules
    monkeypatch.setattr(end_to_end, "check_decoding", lambda model, mode: check_decoding(model, mode, length=20))
    monkeypatch.setattr(end_to_end, "chosen_device", lambda name: torch.device("cpu"))


def options(output: Path, **changes: Any) -> argparse.Namespace:
    every = {"shapes": ["135M"], "kinds": list(KINDS), "modes": ["eager"], "minutes": None}
    return argparse.Namespace(output=output, **{**every, **changes})


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def labels(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["mode"], row["batch"], row["context"]


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    before = getattr(end_to_end, name)

    def call(*args: Any) -> Any:
        calls.append(args)
        return before(*args)

    monkeypatch.setattr(end_to_end, name, call)
    return calls


def test_only_models_in_a_form_of_their_own_are_measured_by_graph() -> None:
    rows = list(end_to_end.labels(["1B"], list(KINDS), list(MODES)))
    for kind, chosen in KINDS.items():
        modes = {row["mode"] for row in rows if row["kind"] == kind}
        assert modes == ({"eager", "graph"} if chosen.served else {"eager"})
    assert len({tuple(row.values()) for row in rows}) == len(rows)


def test_rows_and_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes share a model; nothing is measured twice."""
    monkeypatch.setitem(CAPTURES, "cpu", EmulatedCapture())
    models, checks = counted(monkeypatch, "random_model"), counted(monkeypatch, "check_decoding")
    path = tmp_path / "new" / "rows.json"
    chosen = options(path, modes=["eager", "graph"], kinds=["teacher", "hybrid25"])
    benchmark(chosen)
    rows, points = rows_of(path), [(1, 16), (2, 24)]
    assert [labels(row) for row in rows] == [
        (kind, mode, *point) for kind in ("teacher", "hybrid25") for point in points for mode in ("eager", "graph")
    ]
    keys = {"shape", "kind", "mode", "batch", "context", "prefill_tokens_per_s", "decode_ms", "cache_mb"}
    assert all(set(row) == keys and row["decode_ms"] > 0 < row["prefill_tokens_per_s"] for row in rows)
    for row in rows[:4]:  # 4 layers, 2 heads of 8 channels, keys and values, 2 bytes
        assert row["cache_mb"] == round(row["batch"] * row["context"] * 4 * 2 * 8 * 2 * 2 / 1e6, 3)
    assert (len(models), len(checks)) == (2, 4)
    document = json.loads(path.read_text())
    assert document["command"] == "python -m measuring.benchmarks.end_to_end --output rows.json"

    benchmark(chosen)
    assert (len(models), rows_of(path)) == (2, rows)
    write = json.dumps({**document, "rows": [row for row in rows if labels(row) != ("teacher", "graph", 2, 24)]})
    path.write_text(write)
    benchmark(chosen)
    assert (len(models), len(checks)) == (3, 5)
    assert sorted(map(labels, rows_of(path))) == sorted(map(labels, rows))


def test_errors_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not measured again, and the rows behind them are measured."""
    path, failures = tmp_path / "rows.json", iter((torch.OutOfMemoryError("full"), ZeroDivisionError("lost")))

    def check(model: Any, mode: Any) -> float:
        if mode.name == "graph":
            raise QualityError("graph: a greedily decoded token is\n wrong")
        return 0.0

    def fail(*args: Any) -> Any:
        raise next(failures)

    monkeypatch.setattr(end_to_end, "check_decoding", check)
    monkeypatch.setattr(end_to_end, "figures", fail)
    chosen = options(path, modes=["eager", "graph"], kinds=["teacher"])
    benchmark(chosen)
    rows, wrong = rows_of(path), "graph: a greedily decoded token is wrong"
    assert {labels(row)[1:]: row["error"] for row in rows} == {
        ("eager", 1, 16): "out of memory",
        ("graph", 1, 16): wrong,
        ("eager", 2, 24): "ZeroDivisionError: lost",
        ("graph", 2, 24): wrong,
    }
    benchmark(chosen)
    assert rows_of(path) == rows


def test_the_time_ends_after_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, clock = tmp_path / "rows.json", [0.0]
    monkeypatch.setattr(end_to_end, "check_decoding", lambda *_: 0.0)
    monkeypatch.setattr(row_files.time, "monotonic", lambda: clock[0])
    models = counted(monkeypatch, "random_model")
    before = end_to_end.figures

    def figures(*args: Any) -> dict[str, Any]:
        clock[0] += 40
        return before(*args)

    monkeypatch.setattr(end_to_end, "figures", figures)
    for count, made, minutes in ((3, 2, 1.5), (3, 2, 0.0), (4, 3, 0.5), (2 * len(KINDS), len(KINDS) + 1, None)):
        benchmark(options(path, minutes=minutes))
        assert (len(rows_of(path)), len(models)) == (count, made)
        assert ("the time is over" in capsys.readouterr().out) == (minutes is not None)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"a": 1}'):
        (tmp_path / "f.json").write_text(text)
        with pytest.raises(UserError, match=r"f.json: not a file of this command"):
            benchmark(options(tmp_path / "f.json"))


def test_windows_by_layer_are_those_of_the_shipped_plan() -> None:
    assert read_selection(SHIPPED / "smollm2-135m-instruct.json").planned_windows == PLANNED
