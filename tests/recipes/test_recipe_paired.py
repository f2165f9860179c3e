"""tools/paired.py compares runs over the same tokens batch by batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltanet_hf.errors import UserError
from paired import compare, main, markdown


def log(factor: float, align_tokens: int, until: int) -> list[dict[str, float | str]]:
    """The log of a run whose KL on the batch that ends at token t is factor * t, after `align_tokens` of alignment."""
    rows: list[dict[str, float | str]] = []
    if align_tokens:
        rows.append({"stage": "align", "step": 1, "tokens": align_tokens, "held_out.error": 0.5})
    rows.append({"stage": "distil", "step": 0, "tokens": 0, "held_out.kl": 9.0})
    for place in range(align_tokens + 10, until + 1, 10):
        rows.append({"stage": "distil", "step": 1, "tokens": place - align_tokens, "kl": factor * place})
    return rows


def test_the_same_batches_are_compared_whatever_came_before_them() -> None:
    found = compare(log(0.9, 0, 200), log(1.0, 100, 200))
    assert found["kl_ratio"] == pytest.approx(0.9)
    assert found["stderr"] == pytest.approx(0.0, abs=1e-9)
    assert found["tokens"] == 200
    assert found["aligned_error"] is None


def test_a_run_that_was_cut_off_is_compared_as_far_as_it_came_and_one_that_was_cut_early_is_refused() -> None:
    base = log(1.0, 100, 300)
    assert compare(log(1.2, 100, 280), base)["kl_ratio"] == pytest.approx(1.2)
    with pytest.raises(UserError, match="no common logged batches"):
        compare(log(1.2, 100, 200), base)


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("base", 1.0), ("better", 0.8)):
        (tmp_path / name).mkdir()
        text = "\n".join(json.dumps(row) for row in log(factor, 100, 300))
        (tmp_path / name / "log.jsonl").write_text(text + "\n")
    main(tmp_path, "base", ["better"], tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["run"] for row in rows] == ["base", "better"]
    assert capsys.readouterr().out.strip() == markdown(rows)
    assert "-20.0%" in markdown(rows)
    with pytest.raises(UserError, match="none: no log"):
        main(tmp_path, "base", ["none"], tmp_path / "out.json")
