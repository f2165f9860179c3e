"""The estimates before training: parameters and files are counted right, and 8B fits where the recipes say."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_recipes.config import read_recipe
from deltanet_recipes.schema import Align
from deltanet_recipes.training.adapters import train_for
from deltanet_recipes.training.estimate import estimates
from deltanet_recipes.training.layerwise import LayerwiseAlign
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.model_pair import load_student, mixers
from deltanet_recipes.training.pipeline import run, show_run
from deltanet_recipes.training.plan_view import show_plan
from deltanet_recipes.training.runtime import Runtime
from support.tiny_run import ALIGN, DISTIL, make_workplace, tiny_recipe


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("plan"), layers=(0, 2))


def test_the_plan_counts_what_is_trained(workplace: Path, tmp_path: Path) -> None:
    distil = [{"train": "frozen"}, {"train": "lora"}, {"train": "lora", "lora_rank": 3}, {"train": "full"}]
    for stage in (ALIGN, {**ALIGN, "mode": "layerwise"}, *({**DISTIL, **changes} for changes in distil)):
        recipe = tiny_recipe(workplace, tmp_path / "run", stage)
        student = load_student(recipe.student, torch.float32)
        (found,) = estimates(recipe.stages, student, Runtime(recipe.engine), holdout_tokens=0)
        train_for(student, recipe.stages[0], seed=0)
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        parts = [entry for mixer in mixers(student).values() for entry in mixer.named_parameters()]
        in_mixers = sum(p.numel() for name, p in parts if p.requires_grad and "lora_" not in name)
        assert (found.in_mixers, found.rest) == (in_mixers, trained - in_mixers)


def test_the_plan_knows_the_files_that_a_stage_keeps(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, int] = {}

    def size(pattern: str) -> int:
        return sum(path.stat().st_size for path in (tmp_path / "run").rglob(pattern))

    def look(self: LayerwiseAlign, index: int, mixer: nn.Module) -> None:
        kept["activations"] = size("activations-0/*")

    monkeypatch.setattr(LayerwiseAlign, "train_mixer", look)
    stages = [{**ALIGN, "mode": "layerwise", "cached_tokens": 512}, DISTIL]
    recipe = tiny_recipe(workplace, tmp_path / "run", *stages)
    run(recipe)
    student, runtime = load_student(recipe.student), Runtime(recipe.engine)
    plan = estimates(recipe.stages, student, runtime, recipe.data.holdout_tokens)
    layerwise, distil = (found.disk for found in plan)
    assert layerwise == pytest.approx(kept["activations"], rel=0.1)
    assert distil == 0


def test_a_lack_of_memory_is_said(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(workplace, tmp_path / "run", ALIGN, DISTIL)
    student, runtime = load_student(recipe.student), Runtime(recipe.engine)
    assert runtime.attainable_memory() > 2**28
    plan = estimates(recipe.stages, student, runtime, holdout_tokens=0)
    sizes = [found.peak.total for found in plan]
    between = sum(sizes) // 2
    monkeypatch.setattr(Runtime, "attainable_memory", lambda self: between)
    shown = Console(file=io.StringIO(), width=300)
    show_plan("student -> run", recipe.stages, plan, 0, runtime, Logbook(tmp_path, recipe, True, shown))
    lines = [line for line in shown.file.getvalue().splitlines() if "GiB are free" in line]  # type: ignore[attr-defined]
    assert [line.split(":")[0] for line in lines] == [["align", "distil"][sizes.index(max(sizes))]]
    assert "micro_batch_rows" in lines[0]


def test_a_dry_run_shows_the_stages_and_writes_nothing(workplace: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(workplace, tmp_path / "run", ALIGN, {**DISTIL, "train": "full"})
    shown = io.StringIO()
    show_run(recipe, Console(file=shown, width=300))
    figures = estimates(recipe.stages, load_student(recipe.student), Runtime(recipe.engine), holdout_tokens=0)
    rows = [line for line in shown.getvalue().splitlines() if "align" in line or "distil" in line]
    for row, found, stage in zip(rows, figures, recipe.stages, strict=True):
        assert f"{found.rest / 1e6:.1f}M" in row
        assert f"{stage.steps:,} x {stage.batch_tokens:,}" in row
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(("name", "family"), [("qwen3-8b", "qwen3"), ("llama-3.1-8b", "llama")])
def test_one_gpu_of_24_gb_aligns_8b(name: str, family: str) -> None:
    """The estimate needs shapes only, so the weights are on the meta device."""
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    size = {"intermediate_size": 14336, "vocab_size": 152064, "tie_word_embeddings": False, "head_dim": 128}
    config = FAMILIES[family].config_class(**shape, **size)
    table = LayerTable.preset(32, softmax=range(3, 32, 4))
    with torch.device("meta"):
        student = model_class(family)(converted_config(config, table))
    assert sum(p.numel() for p in student.parameters()) > 8e9
    recipe = read_recipe(name)
    cuda = torch.device("cuda")
    alone: Any = SimpleNamespace(world=1, bf16=True, compile=True, device=cuda, engine=recipe.engine)
    align = next(stage for stage in recipe.stages if isinstance(stage, Align))
    joint = align.model_copy(update={"mode": "joint"})
    layerwise, whole = estimates([align, joint], student, alone, recipe.data.holdout_tokens)
    assert 1.5 * 2**30 < layerwise.peak.total < 12 * 2**30
    assert layerwise.disk == pytest.approx(26e9, rel=0.1)
    assert whole.peak.total > 24 * 2**30
