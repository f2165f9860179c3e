"""Budgets, files and commands of `deltanet-hf select`: what is computed, and what is refused with one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltanet_convert.keep_option import table_of
from deltanet_convert.meta_model import meta_model
from deltanet_convert.options import ConvertOptions
from deltanet_convert.select import probes, read_selection
from deltanet_convert.select.budget import USUAL_SHARE, Budget
from deltanet_convert.select.cache_sizes import CacheSizes
from deltanet_convert.select.command import select_command
from deltanet_convert.select.for_convert import SHAPES, shipped_selection
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.select.selection_file import file_selection
from deltanet_convert.select.spending import Spending
from deltanet_convert.select.units import Candidates
from deltanet_convert.teacher_model import Teacher
from deltanet_hf import converted_config, loading
from deltanet_hf.errors import UserError
from deltanet_hf.models.cache_bits import stored_bytes
from deltanet_hf.models.factory import model_class
from support.refusals import assert_refused
from support.tiny_conversion import teacher_folder, tiny_job
from support.tiny_models import teacher_config
from support.tiny_selection import selection_file, tiny_selection, tiny_task

THIRTY = Candidates(tuple((i,) for i in range(30)), (), None)


def smollm2(at: int, candidates: Candidates = THIRTY, **options: Any) -> CacheSizes:
    """SmolLM2-135M; by default 768 bytes per token and layer, and states of 9 heads of 64 x 64 in float32."""
    config = LlamaConfig(**SHAPES["smollm2-135m-instruct.json"])
    teacher: Any = SimpleNamespace(
        config=config, num_layers=30, dtype=torch.bfloat16, model=meta_model(LlamaForCausalLM, config, torch.bfloat16)
    )
    made = ConvertOptions(**(options or {"mixer": "gated_deltanet", "cache_bits": 16, "changes": ("conv_size=0",)}))
    return CacheSizes(teacher, candidates, at, made.cache_bits, made.table(30, ()).only_kind)


SMOLLM2 = smollm2(2048)


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CHARACTERS", 2000)


def test_the_shipped_plan_with_states_takes_the_bytes_of_that_without() -> None:
    config = LlamaConfig(**SHAPES["smollm2-135m-instruct.json"])
    sizes, shares = [], []
    for mixer in ("window", "gated_deltanet+window"):
        selection = shipped_selection(config, with_states=mixer != "window")
        table = table_of(ConvertOptions(mixer=mixer), selection, config)
        model = meta_model(model_class("llama"), converted_config(config, table), torch.bfloat16)
        sizes.append(stored_bytes(model, 2048, 4))
        shares.append([window / min(selection.planned_windows) for window in selection.planned_windows])
        planned = smollm2(2048, Candidates.of(config, "kv_head"), mixer=mixer)
        assert planned.total(selection.kept, selection.planned_windows) == sizes[-1]
        # The windows of the plan without states, which a budget of these bytes makes shorter where there are states.
        spending = Spending(Budget.parse(f"{sizes[0]}@2k"), planned)
        assert spending.usual_count() == len(selection.kept)
        assert spending.counts()[7:] == ([22, 26, 29, 32] if mixer == "window" else [21, 24, 27, 30])
        windows = spending.windows(selection.kept, shares[0])
        assert windows is not None
        assert planned.total(selection.kept, windows) == pytest.approx(sizes[0], rel=2e-3)
    assert sizes[0] == pytest.approx(5.33e6, rel=1e-3)
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)


def test_budgets_in_units() -> None:
    for budget, units in {"7": 7, "25%": 7, "10%": 3, "29": 29, "50%": 15}.items():
        assert Budget.parse(budget).units(THIRTY) == units
    hundred = Candidates(tuple((i,) for i in range(100)), (), None)
    assert Budget.parse("29%").units(hundred) == 29  # 0.29 * 100 is a little less


def test_budgets_in_bytes_are_kept_and_could_not_keep_one_more() -> None:
    assert Budget.parse("5850KB@2048").units_of_bytes(SMOLLM2) == 1  # the smallest, as the refusal names it
    assert SMOLLM2.teacher_bytes == 30 * 768 * 2048
    for spec, allowed in {"15MB@2048": 15e6, "32%@2k": 0.32 * SMOLLM2.teacher_bytes}.items():
        budget = Budget.parse(spec)
        assert budget.at == 2048
        found = budget.units_of_bytes(SMOLLM2)
        assert SMOLLM2.total(THIRTY.units[:found], None) <= allowed < SMOLLM2.total(THIRTY.units[: found + 1], None)


WRONG_BUDGETS: list[tuple[str, str]] = [
    ("many", "--keep many: expected a number of units such as 7, a share such as 25%, 40MB@32k, or auto; "),
    ("", "--keep : expected a number of units"),
    ("-1", "--keep -1: expected"),
    ("²", "--keep ²: expected"),
    ("0", "--keep 0: keeps none of the 30 units"),
    ("2%", "--keep 2%: keeps none"),
    ("30", "--keep 30: keeps all 30 units; leave at least one"),
    ("31", "--keep 31: there are only 30 units"),
    ("200%", "--keep 200%: there are only 30"),
    ("40MB@", "'' is no length in tokens"),
    ("40MB@0", "'0' is no length in tokens"),
    ("40MB@32K", "'32K' is no length in tokens"),
    ("40XB@2048", "--keep 40XB@2048: got '40XB', expected a size"),
    ("1MB@2048", "too few bytes; the smallest budget is --keep 5850KB@2048, one whole unit"),
    ("1GB@2048", "holds the teacher's own cache in 16 bits, 47.2 MB"),
    ("0%@2048", "too few bytes; the smallest budget is --keep 5850KB@2048"),
]


def test_the_usual_budget_is_that_of_convert(far: Path) -> None:
    usual: list[tuple[dict[str, Any], str, str]] = [
        ({}, USUAL_SHARE, "kv_head"),  # heads and windows
        ({"unit": "layer"}, USUAL_SHARE, "layer"),
        ({"cache_bits": 16}, "1", "layer"),  # of four layers
        ({"mixer": "gated_deltanet"}, "1", "layer"),
        ({"method": "uniform", "unit": "kv_head"}, "2", "kv_head"),  # of eight heads
    ]
    for options, text, unit in usual:
        task = tiny_task(far, "auto", **options)
        assert (task.budget.text, task.options.unit) == (text, unit)
    beside_sliding = Candidates(((0,), (2,), (4,), (6,), (8,)), (1, 3, 5, 7), 512)
    assert Budget.usual(beside_sliding, True).text == "3"
    assert Budget.usual(Candidates(((0,), (1,)), (), None), False).text == "1"


def test_without_a_gpu_few_derivatives_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, dict[str, Any], str, int]] = [
        ("cpu", {"exportable": False}, "gradient", 2),
        ("cpu", {"probes": 3}, "gradient", 3),
        ("cpu", {"method": "forward"}, "forward", 8),
        ("cpu", {"exportable": True}, "forward", 8),
        ("cuda", {}, "forward", 8),
    ]
    for device, given, method, count in chosen:
        monkeypatch.setattr(loading, "chosen_device", lambda name, device=device: torch.device(device))
        options = SelectOptions(**given)
        assert (options.method, options.probes) == (method, count)


def test_budgets_that_make_no_sense_are_refused() -> None:
    def units(text: str) -> None:
        budget = Budget.parse(text)
        budget.units(THIRTY) if budget.at is None else budget.units_of_bytes(SMOLLM2)

    rows = [({"text": text}, UserError, rf"^[^\n]*{re.escape(message)}[^\n]*$") for text, message in WRONG_BUDGETS]
    assert_refused(units, rows)


def test_a_length_at_which_the_cache_is_smaller_than_the_state_is_refused() -> None:
    with pytest.raises(UserError, match=r"at 64 tokens the keys and values of a unit .* give a larger length"):
        Budget.parse("5MB@64").units_of_bytes(smollm2(64))


def test_bytes_are_those_of_the_converted_model(far: Path, tmp_path: Path) -> None:
    for bits, budget in ((16, "3MB@2000"), (4, "10%@2000")):
        options: dict[str, Any] = {"mixer": "gated_deltanet+window", "cache_bits": bits}
        task = tiny_task(far, budget, **options)
        job = tiny_job(far, tmp_path / "out", layers="keep:2", **options)
        assert task.sizes.total([(2,)], None) == sum(layer.cache_bytes(2000) for layer in job.plan.layers)
        assert task.sizes.teacher_bytes == 4 * 2 * 2 * 32 * 4 * 2000
        assert "positions end at 512" in task.notes[0]


def test_a_spread_of_layers_that_differ_in_size_fits_the_budget(tmp_path: Path) -> None:
    """Two evenly spread layers of this teacher are both large; of three, one is."""
    teacher = teacher_folder(tmp_path / "teacher", "olmo3", sliding_window=2048, max_position_embeddings=16384)
    task = tiny_task(teacher, "60%@16k", mixer="gated_deltanet", cache_bits=16, method="uniform")
    assert task.spread == ((0,), (2,), (3,))
    assert task.sizes.total(task.spread, None) <= task.options.keep.allowed(task.sizes)


def test_the_file_says_everything_and_convert_reads_it(far: Path, tmp_path: Path) -> None:
    out = tmp_path / "selection.json"
    found = tiny_selection(far, out, "2", seed=3)
    assert read_selection(out) == found
    assert (tmp_path / "selection.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["selection.json", "selection.png"]
    value = json.loads(out.read_text())
    assert value["format"] == "deltanet-hf selection 1"
    assert (value["teacher"], value["model_type"], value["unit"], value["budget"]) == ("far", "llama", "layer", "2")
    assert (value["num_hidden_layers"], value["num_key_value_heads"], value["seed"]) == (4, 2, 3)
    assert value["order"][0] == 2
    assert len(value["scores"]["rounds"]) == 2
    config = tiny_task(far).teacher.config
    assert file_selection(str(out), config) == found
    assert found.heads == tuple((layer, head) for layer in found.layers for head in range(2))
    again = tmp_path / "again.json"
    tiny_selection(far, again, "2", seed=3)
    assert again.read_bytes() == out.read_bytes()
    with pytest.raises(UserError, match=r"selection.json: exists; choose another file, or add --overwrite"):
        tiny_selection(far, out, "2", seed=3)
    tiny_selection(far, out, "1", seed=4, overwrite=True)
    assert read_selection(out).seed == 4


@pytest.mark.parametrize("unit", ["layer", "kv_head"])
def test_layers_that_slide_stay_as_they_are(unit: str, tmp_path: Path) -> None:
    """The tiny Gemma slides in layers 0 and 2; the whole budget is for the others."""
    teacher, out = teacher_folder(tmp_path / "teacher", "gemma3_text"), tmp_path / "s.json"
    found = tiny_selection(teacher, out, "50%", method="uniform", unit=unit)
    assert (found.kept, found.local) == (((3,),) if unit == "layer" else ((1, 1), (3, 1)), (0, 2))
    assert read_selection(out) == found
    heads = {(layer, head) for layer in (0, 2) for head in range(2)}
    assert found.heads == tuple(sorted(heads | ({(3, 0), (3, 1)} if unit == "layer" else {(1, 1), (3, 1)})))
    kinds = tiny_job(teacher, tmp_path / "out", layers=str(out)).table.layers
    softmax = [layer for layer, kind in enumerate(kinds) if kind == "softmax"]
    assert softmax == ([0, 2, 3] if unit == "layer" else [0, 2])
    task = tiny_task(teacher, "60%@400", unit=unit, mixer="retention", cache_bits=16)
    layers = tiny_job(teacher, tmp_path / "states", mixer="retention").plan.layers
    states = layers[1].cache_bytes(400) + layers[3].cache_bytes(400)
    assert task.sizes.total((), None) - states == 2 * min(8, 400) * 2 * 2 * teacher_config("gemma3_text").head_dim * 4


def test_spread_units_need_no_run(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Teacher, "load_weights", None)
    assert tiny_selection(far, tmp_path / "a.json", "2", method="uniform").layers == (1, 3)
    assert tiny_selection(far, tmp_path / "b.json", "2", exportable=True).layers == (1, 3)
    assert tiny_selection(far, tmp_path / "c.json", "1", exportable=True).layers == (2,)
    heads = tiny_selection(far, tmp_path / "d.json", "2", method="uniform", unit="kv_head")
    assert heads.heads == ((1, 0), (3, 0))
    with pytest.raises(ValueError, match="names heads"):
        _ = heads.layers


GOOD: dict[str, Any] = {"unit": "layer", "kept": [1, 2], "order": [2, 1]}


EVERY_HEAD = [[layer, head] for layer in range(4) for head in range(2)]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": "deltanet-hf selection 9"}, "key 'format' is 'deltanet-hf selection 9'"),
    *(
        ({"kept": kept, "order": kept}, f"'kept' or 'local' holds ({found}), which the model does not have")
        for kept, found in (([1, 4], "4,"), ([1, -1], "-1,"))
    ),
    ({"kept": [[1, 0]]}, "key 'kept'"),
    ({"kept": {}}, "'kept' and 'order' do not list the same units"),
    ({"kept": 3}, "a key is missing or wrong"),
    ({"kept": [1, 1], "order": [1, 1]}, "'kept' and 'order' do not list the same units once each"),
    ({"order": [1, 3]}, "'kept' and 'order' do not list the same units"),
    ({"kept": [], "order": []}, "'kept' lists nothing"),
    ({"local": 3}, "key 'local'"),
    ({"local": [4]}, "holds (4,), which the model does not have"),
    ({"local": [0, 2]}, "'kept' and 'local' list the same layer"),
    ({"local": [0, 3]}, "keeps all 4 layers"),
    ({"unit": "neuron", "kept": [[1]], "order": [[1]]}, "a key is missing or wrong"),
    ({"unit": "kv_head"}, "key 'kept'"),
    ({"unit": "kv_head", "kept": [[0, 2]], "order": [[0, 2]]}, "holds (0, 2), which the model does not have"),
    ({"unit": "kv_head", "kept": [[0, 1, 2]], "order": []}, "holds (0, 1, 2), which the model does not have"),
    ({"settings": {"kind": {"window": 65}}}, "a key is missing or wrong ('mixer')"),
    ({"teacher": None}, "key 'teacher'"),
    ({"model_type": "qwen3"}, "key 'model_type' is 'qwen3', the teacher's is 'llama'"),
    ({"num_hidden_layers": 8}, "key 'num_hidden_layers' is 8, the teacher's is 4"),
    ({"kept": [0, 1, 2, 3], "order": [0, 1, 2, 3]}, "keeps all 4 layers"),
    ({"unit": "kv_head", "kept": EVERY_HEAD, "order": EVERY_HEAD}, "keeps all 8 heads"),
]


def test_files_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    def read(change: dict[str, Any]) -> None:
        file_selection(selection_file(tmp_path, **{**GOOD, **change}), teacher_config("llama"))

    one_line = rf"^[^\n]*{re.escape(str(tmp_path / 'selection.json'))}[^\n]*"
    rows = [({"change": change}, UserError, rf"{one_line}{re.escape(message)}[^\n]*$") for change, message in WRONG]
    assert_refused(read, rows)


def test_a_file_by_hand_is_read(tmp_path: Path) -> None:
    file = Path(selection_file(tmp_path, **GOOD))
    found = read_selection(file)
    assert found.order == ((2,), (1,))
    assert file_selection(str(file), teacher_config("llama")) == found
    for broken in (b"{", b"\xff", b"[" * 100_000):
        file.write_bytes(broken)
        with pytest.raises(UserError, match="cannot be read"):
            read_selection(file)
    file.write_text("[1, 2]")
    with pytest.raises(UserError, match="key 'format' is 'list'"):
        read_selection(file)


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"keep": "1XB@5"}, "--keep 1XB@5: got '1XB'"),
    ({"exportable": True, "method": "kl"}, "--exportable: keeps every n-th layer, so --method kl has no effect"),
    ({"exportable": True}, "--exportable: other runtimes have gated_deltanet"),
    ({"exportable": True, "mixer": None, "context": "8k"}, "--exportable: other runtimes have gated_deltanet and the"),
    ({"exportable": True, "unit": "kv_head"}, "--exportable: other runtimes keep whole layers"),
    ({"unit": "head"}, "--unit: got 'head'"),
    ({"method": "best"}, "--method: got 'best', expected one of forward, gradient, kl, uniform"),
    ({"window": 0}, "--window: got 0, expected at least 1"),
    ({"probes": 0}, "--probes: got 0"),
    ({"seed": -1}, "--seed: got -1"),
    ({"mixer": "lstm"}, "--mixer: got 'lstm'"),
    ({"device": "tpu9"}, "--device: 'tpu9' cannot be used here"),
    ({"out": "s.png"}, "the plot is written to this name"),
]


def test_refused_options(far: Path, tmp_path: Path) -> None:
    defaults: dict[str, Any] = {
        **{"unit": "layer", "method": "forward", "exportable": False, "keep": "25%"},
        **{"mixer": "window", "window": 6, "sinks": 1, "length": 400, "probes": 1, "seed": 0, "device": None},
    }

    def select(out: str = "s.json", **options: Any) -> None:
        select_command(str(far), out=tmp_path / out, overwrite=False, **{**defaults, **options})

    assert_refused(select, [(options, UserError, re.escape(message)) for options, message in WRONG_OPTIONS])
    assert list(tmp_path.iterdir()) == []
