"""The parts of the expected memory: against measured runs, counted tensors, and settings that change them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.evaluation.speed.random_models import SHAPES
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_recipes.config import read_recipe
from deltanet_recipes.schema import Recipe
from deltanet_recipes.training.cost_estimate import Estimate, estimate

GEMMA = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
}
HYBRID_100M = (2, 7, 8, 15, 17, 18, 23)


def meta_student(shape: dict[str, Any], family: str = "llama", softmax: Any = (), **settings: Any) -> PreTrainedModel:
    """A student of real shape without memory, in bfloat16 as students are stored."""
    config = FAMILIES[family].config_class(**shape)
    table = LayerTable.preset(config.num_hidden_layers, softmax=softmax, **settings)
    with torch.device("meta"):
        student: PreTrainedModel = model_class(family)(converted_config(config, table))
    return student.to(torch.bfloat16)


def gpus(world: int = 1) -> Any:
    """What an estimate reads of a `Runtime` on GPUs."""
    return SimpleNamespace(world=world, bf16=True, compile=True)


def sizes(recipe: Recipe, kind: str, student: PreTrainedModel, world: int = 1) -> Estimate:
    stage = next(stage for stage in recipe.stages if stage.kind == kind)
    return estimate(stage, recipe, student, gpus(world))


FULL = ["stages.distil.train=full"]
MEASURED = [
    ("smollm2-135m-10m", FULL, "align", 3.3),
    ("smollm2-135m-10m", FULL, "distil", 7.5),
    ("smollm2-135m-100m", FULL, "distil", 17.0),
    ("gemma-3-270m-10m", FULL, "distil", 16.4),
    ("smollm2-135m-hybrid-100m", [], "long", 15.2),
]


@pytest.mark.parametrize(("name", "changes", "kind", "gib"), MEASURED)
def test_the_estimate_is_within_a_tenth_of_runs_on_an_h200(
    name: str, changes: list[str], kind: str, gib: float
) -> None:
    """These peaks were reached while a graph was recorded, before the optimiser had a state (docs/training.md).

    At that time, joint alignment also held the student's other layers and the hidden states between the teacher's.
    """
    if name.startswith("gemma"):
        student = meta_student(GEMMA, "gemma3_text")
    elif "hybrid" in name:
        student = meta_student(SHAPES["135M"], softmax=HYBRID_100M, mixer="gated_deltanet+window")
    else:
        student = meta_student(SHAPES["135M"])
    parts = sizes(read_recipe(name, changes), kind, student).peak
    then = parts.total - parts.optimizer
    if kind == "align":
        then += 2 * 106_000_000 + 30 * 4096 * 576 * 2
    assert then / 2**30 == pytest.approx(gib, rel=0.1)
