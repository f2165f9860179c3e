"""The defaults that depend on the teacher: the mixer without --mixer, and the bytes that `select` counts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltanet_convert.convert_command import convert_command
from deltanet_convert.job import Job, prepare
from deltanet_convert.options import DEFAULT_MIXER, ConvertOptions
from deltanet_convert.select.command import selected
from deltanet_convert.select.run import unseen
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.select.task import plan_selection
from deltanet_hf.errors import UserError

SMALL, LARGE = "45KB@512", "80KB@512"  # with a quarter and a seventh of the bytes in states


def planned(teacher: Path, out: Path, **options: Any) -> Job:
    return prepare(str(teacher), out, ConvertOptions(dry_run=True, **options))


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"keep": SMALL}, "window"),
        ({"keep": LARGE}, DEFAULT_MIXER),
        ({"keep": "auto"}, DEFAULT_MIXER),
        ({"keep": "every:4"}, DEFAULT_MIXER),
        ({"keep": SMALL, "mixer": DEFAULT_MIXER}, DEFAULT_MIXER),
    ],
    ids=str,
)
def test_windows_are_alone_where_states_take_too_much(
    far: Path, tmp_path: Path, options: dict[str, Any], made: str
) -> None:
    assert planned(far, tmp_path / "out", **options).options.mixer == made


def test_settings_of_states_name_the_mixer_that_has_none(far: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--set state_dtype=float32: unknown key 'state_dtype' of --mixer window; "):
        planned(far, tmp_path / "out", keep=SMALL, changes=("state_dtype=float32",))


def test_bytes_of_spread_units_are_those_of_what_convert_makes(far: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises(UserError, match="the smallest budget is --keep 125KB@512, one whole unit"):  # with states
        selected(str(far), SelectOptions(keep=SMALL, method="uniform", out=out), unseen)
    _, task = selected(str(far), SelectOptions(keep="400KB@512", exportable=True, out=out), unseen)
    plan = planned(far, tmp_path / "out", keep=str(out), profile="qwen3_5").plan
    assert task.sizes is not None
    assert task.spread is not None
    assert task.sizes.total(task.spread, None) == sum(layer.cache_bytes(512) for layer in plan.layers)


@pytest.mark.parametrize("mixer", ["window", DEFAULT_MIXER, "retention+window"])
def test_a_selection_becomes_what_it_was_planned_for(
    far: Path, tmp_path: Path, mixer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = planned(far, tmp_path / "out", keep=LARGE, mixer=mixer)
    table = job.options.table(job.teacher.num_layers, (), job.teacher.config)
    selection = plan_selection(job.teacher, SelectOptions(keep=LARGE), table).unmeasured()
    (tmp_path / "plan.json").write_text(json.dumps(selection.to_json()))
    made = planned(far, tmp_path / "out", keep=str(tmp_path / "plan.json"))
    assert made.options.mixer == mixer
    assert sum(layer.cache_bytes(512) for layer in made.plan.layers) <= 80_000
    convert_command(str(far), tmp_path / "out", keep=str(tmp_path / "plan.json"), dry_run=True)
    assert ("Windows alone (--mixer window)" in capsys.readouterr().out) == (mixer == "window")
