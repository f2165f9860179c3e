"""The benchmark of large models: end to end with a tiny one, and its parts on logs and processes made up here."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deltanet_hf.errors import UserError
from deltanet_recipes.config import read_recipe
from deltanet_recipes.schema import Align
from measuring.benchmarks import large_models, random_inputs
from measuring.benchmarks.large_models import RESULTS, benchmark, recipe_changes, train_command
from measuring.benchmarks.random_inputs import Inputs, prepare
from measuring.benchmarks.random_teacher import write_teacher
from measuring.benchmarks.stage_row import stage_figures
from measuring.rows import RowFile
from support.tiny_run import ALIGN, DISTIL

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


def options(shape: str, output: Path, **changes: Any) -> argparse.Namespace:
    defaults = {"stages": None, "train": "lora", "steps": 200, "processes": 1, "micro_batches": None, "set": []}
    return argparse.Namespace(shape=shape, output=output, **{**defaults, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "stages"),
    [(("--mixer", "gated_deltanet"), ("align", "distil")), (("--mixer", "window", "--set", "window=8"), ("distil",))],
    ids=["states", "windows"],
)
def test_a_tiny_model_is_trained(
    others: tuple[str, ...], stages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"student": "s", "output": "o", "stages": [{**ALIGN, "mode": "layerwise"}, DISTIL]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setitem(random_inputs.SHAPES, "tiny", TINY)
    monkeypatch.setitem(large_models.RECIPES, "tiny", str(tmp_path / "tiny.yaml"))
    monkeypatch.setattr(random_inputs, "HYBRID", ("--layers", "keep:1", *others))
    monkeypatch.setattr(random_inputs, "TOKENS", 1 << 15)
    monkeypatch.setattr(large_models, "make_inputs", prepare)
    benchmark(options("tiny", tmp_path / "out", steps=40, set=["engine.device=cpu"]))
    rows = {row["stage"]: row for row in json.loads((tmp_path / "out" / RESULTS).read_text())}
    assert set(rows) == {*stages}
    for row in rows.values():
        assert (row["steps"], row["rows"], row["batch_tokens"], row["gpus"]) == (40, 64, 128, 1)
        assert row["loss_last"] < row["loss_first"]
        assert row["tokens_per_s"] > 0
        assert row["memory_gib"] > 0
        assert row["share_of_peak"] is None  # a CPU
    assert not (tmp_path / "out" / "tiny-lora-1" / "final").exists()
    with pytest.raises(UserError, match=r"^training ended with exit code \d+; see the lines above$"):
        benchmark(options("tiny", tmp_path / "out", steps=40, set=["engine.device=cpu", "data.separator=1000"]))
    assert json.loads((tmp_path / "out" / RESULTS).read_text())[-1]["stage"] == "error"


def log_rows(stage: str, losses: list[float], speeds: list[float], **more: Any) -> list[dict[str, Any]]:
    rows = [{"stage": stage, "step": 0, "tokens_per_second": 0.0, "memory_gib": 1.0}]  # before the first step: no loss
    for step, (loss, speed) in enumerate(zip(losses, speeds, strict=True), 1):
        rows.append(
            {"stage": stage, "step": step, "loss": loss, "tokens_per_second": speed, "memory_gib": 30.0, **more}
        )
    return rows


def made_up_run(folder: Path, rows: list[dict[str, Any]], device: str, processes: int) -> None:
    flops = {"teacher": 1e9, "forward": 2e9, "backward": 3e9}
    stages = [{"stage": name, "memory_gib": 31.004, "flops_per_token": flops} for name in ("align", "distil")]
    (folder / "plan.json").write_text(json.dumps({"device": device, "processes": processes, "stages": stages}))
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_speed_is_the_median_after_compilation_and_the_share_counts_all_gpus(tmp_path: Path) -> None:
    rows = log_rows("align", [9.0], [7.0]) + log_rows(
        "distil", [5, 4, 3, 2, 1], [1, 90, 30_000, 10_000, 20_000], kl=0.5
    )
    made_up_run(tmp_path, rows, "NVIDIA H200", 2)
    figures = stage_figures(tmp_path, "distil")
    assert (figures["loss_first"], figures["loss_last"], figures["kl_last"]) == (5, 1, 0.5)
    assert figures["tokens_per_s"] == 20_000
    assert figures["share_of_peak"] == pytest.approx(6e9 * 20_000 / (2 * 989e12), abs=5e-4)
    assert (figures["memory_gib"], figures["planned_gib"]) == (30.0, 31.0)


def test_layers_aligned_one_by_one_are_one_row(tmp_path: Path) -> None:
    rows = log_rows("align.0", [4, 3, 2], [1, 1, 10]) + log_rows("align.2", [8, 7, 6], [1, 1, 30])
    made_up_run(tmp_path, rows, "CPU (2 threads)", 1)
    figures = stage_figures(tmp_path, "align")
    assert (figures["loss_first"], figures["loss_last"], figures["tokens_per_s"]) == (6, 4, 20)
    assert figures["flops_per_token"] == 3e9  # of one layer
    assert figures["share_of_peak"] is None


def test_a_row_replaces_the_one_with_its_key(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    for row in ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 2}):
        RowFile(path, ("a",)).add(row)
    assert json.loads(path.read_text()) == [{"a": 2, "b": 1}, {"a": 1, "b": 2}]


def test_rows_that_are_added_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """The lock belongs to an opened file, so that it separates threads as it separates processes."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: RowFile(tmp_path / "rows.json", ("a",)).add({"a": i}), range(40)))
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 40


@pytest.mark.parametrize(("number", "shape"), enumerate(large_models.RECIPES))
def test_the_shipped_recipes_become_short_runs(tmp_path: Path, number: int, shape: str) -> None:
    name, processes = large_models.RECIPES[shape], 1 + number % 2
    chosen = options(shape, tmp_path, processes=processes, micro_batches=1, train="full", set=["seed=3"])
    changes = recipe_changes(chosen, read_recipe(name), Inputs(tmp_path), tmp_path / "run")
    recipe = read_recipe(name, changes)
    assert recipe.seed == 3
    assert recipe.engine.sharding == ("none" if processes == 1 else "fsdp2")
    assert [stage.steps for stage in recipe.stages] == [200] * len(recipe.stages)
    for stage, shipped in zip(recipe.stages, read_recipe(name).stages, strict=True):
        assert stage.sequence_length == shipped.sequence_length
        if not isinstance(stage, Align):
            assert stage.train == "full"
            assert stage.optimizer.rest_lr == shipped.optimizer.rest_lr / 2
    assert "accelerate.commands.launch" in train_command(name, changes, 2)


def test_stages_that_a_recipe_has_not_are_refused(tmp_path: Path) -> None:
    chosen = options("1B", tmp_path, stages=["align", "repair"])
    with pytest.raises(UserError, match=r"llama-3\.2-1b has no stage repair; it has align, distil, long"):
        recipe_changes(chosen, read_recipe("llama-3.2-1b"), Inputs(tmp_path), tmp_path / "run")
    only = recipe_changes(
        options("8B", tmp_path, stages=["distil"]), read_recipe("llama-3.1-8b"), Inputs(tmp_path), tmp_path / "run"
    )
    assert [stage.kind for stage in read_recipe("llama-3.1-8b", only).stages] == ["distil"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_random_teacher_is_a_complete_checkpoint(tmp_path: Path, tied: bool) -> None:
    config = LlamaConfig(**{**TINY, "tie_word_embeddings": tied})
    write_teacher(tmp_path, config)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    write_teacher(tmp_path, config)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) == (not tied)
    assert float(saved["model.embed_tokens.weight"].float().std()) == pytest.approx(0.02, rel=0.05)
    model, found = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == TINY["vocab_size"]
