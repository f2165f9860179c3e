"""On a GPU: a replayed CUDA graph, and compiled layers, give the gradients of plain eager execution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltanet_recipes.adapters import train_for
from deltanet_recipes.losses import Head, KlTerms, live_chunk
from deltanet_recipes.microstep import MicroStep, compile_layers
from deltanet_recipes.models import decoder_layers, load_student
from deltanet_recipes.objectives import Batch, Distil
from deltanet_recipes.packing import make_rows
from deltanet_recipes.runtime import Runtime
from deltanet_recipes.schema import Distil as DistilStage
from deltanet_recipes.schema import Engine
from deltanet_recipes.walk import document_boundaries
from tests.recipes.tiny_run import SHAPE, make_models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LARGER = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}


def gradients(folder: Path, compiled: bool, graphs: bool, isolate: bool) -> dict[str, torch.Tensor]:
    """Summed gradients of three micro-batches."""
    from transformers import AutoModelForCausalLM

    runtime = Runtime(Engine(compile=compiled, cuda_graphs=graphs))
    student = load_student(str(folder / "student"), torch.bfloat16)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.bfloat16).cuda().eval()
    train_for(student, DistilStage(tokens=8192, train="full"), seed=0)
    student.cuda()
    chunk = live_chunk(Head.of(student), Head.of(teacher.requires_grad_(False)), KlTerms())
    if compiled:
        torch._dynamo.reset()
        chunk = torch.compile(chunk, dynamic=False)
        compile_layers([*decoder_layers(student), *decoder_layers(teacher)])
    objective = Distil(student, teacher, chunk, 64)
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    micro = MicroStep(runtime, objective, list(trained.values()))
    generator = np.random.default_rng(0)
    for _ in range(3):
        ids = generator.integers(3, SHAPE["vocab_size"], (4, 129))
        ids[:, 50] = 2
        rows = make_rows(ids, np.ones_like(ids, dtype=bool), 2, isolate).to(runtime.device)
        micro(Batch(rows, document_boundaries(rows.position_ids), torch.tensor(500.0, device=runtime.device)))
    return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(("compiled", "graphs"), [(False, True), (True, False), (True, True)])
def test_gradients_equal_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool, graphs: bool, isolate: bool
) -> None:
    changed: dict[str, Any] = {**SHAPE, **LARGER}
    monkeypatch.setattr("tests.recipes.tiny_run.SHAPE", changed)
    make_models(tmp_path)
    plain = gradients(tmp_path, False, False, isolate)
    other = gradients(tmp_path, compiled, graphs, isolate)
    assert plain.keys() == other.keys()
    for name, grad in plain.items():
        error = float((other[name] - grad).norm() / grad.norm().clamp(min=1e-6))
        assert error < (0.05 if compiled else 0.01), (name, error)
