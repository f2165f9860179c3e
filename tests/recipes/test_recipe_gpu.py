"""On a GPU: a replayed CUDA graph, and compiled layers, give the gradients of plain eager execution.

Messages are one line, for `--tb=line`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltanet_hf.mixers import MIXERS
from deltanet_recipes.data.packing import make_rows
from deltanet_recipes.schema import Distil
from deltanet_recipes.schema_sections import Engine
from deltanet_recipes.training.adapters import train_for
from deltanet_recipes.training.layer_runner import document_boundaries
from deltanet_recipes.training.losses import Head, KlTerms, live_chunk
from deltanet_recipes.training.microstep import MicroStep, compile_layers
from deltanet_recipes.training.model_pair import decoder_layers, load_student
from deltanet_recipes.training.objectives import Batch, DistilLoss
from deltanet_recipes.training.runtime import Runtime
from support.tiny_run import SHAPE, make_models

pytestmark = pytest.mark.gpu
READS_LENGTHS = ("ttt", "titans")  # lay packed documents out on the host, which no graph captures
LARGER = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 256}


def gradients(
    folder: Path, compiled: bool, graphs: bool, isolate: bool, alone: bool = False, precision: Any = "bf16"
) -> dict[str, torch.Tensor]:
    """The gradients of three micro-batches: their sum, or with `alone` those of the last one."""
    from transformers import AutoModelForCausalLM

    runtime = Runtime(Engine(compile=compiled, cuda_graphs=graphs, precision=precision))
    torch.set_float32_matmul_precision("highest")  # not TF32, which the runtime asks for
    dtype = runtime.compute_dtype
    student = load_student(str(folder / "student"), torch.bfloat16).to(dtype)  # type: ignore[arg-type]
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=dtype).cuda().eval()
    train_for(student, Distil(tokens=8192, train="full"), seed=0)
    student.cuda()
    chunk = live_chunk(Head.of(student), Head.of(teacher.requires_grad_(False)), KlTerms())
    if compiled:
        torch._dynamo.reset()
        chunk = torch.compile(chunk, dynamic=False)
        compile_layers([*decoder_layers(student), *decoder_layers(teacher)])
    objective = DistilLoss(student, teacher, chunk, 64).cuda()
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    micro = MicroStep(runtime, objective, list(trained.values()), alone)
    generator = np.random.default_rng(0)
    for _ in range(3):
        ids = generator.integers(3, SHAPE["vocab_size"], (4, 129))
        ids[:, 50] = 2
        rows = make_rows(ids, np.ones_like(ids, dtype=bool), 2, isolate).to(runtime.device)
        if alone:
            micro.begin()
        micro(Batch(rows, document_boundaries(rows.position_ids), torch.tensor(500.0, device=runtime.device)))
    return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


def relative_error(grad: torch.Tensor, truth: torch.Tensor) -> float:
    return float((grad - truth).norm() / truth.norm().clamp(min=1e-6))


def assert_close(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], again: Callable[[], Any]) -> None:
    """Every gradient within 1%. Otherwise the worst, and how much those of `again`, a second run, differ."""
    assert found.keys() == truth.keys(), f"gradients on one side only: {sorted(found.keys() ^ truth.keys())}"
    errors = {name: relative_error(found[name], grad) for name, grad in truth.items()}
    wrong = sorted((name for name in errors if not errors[name] < 0.01), key=lambda name: -errors[name])
    if wrong:
        repeated = again()
        lines = [
            f"{name} {errors[name]:.2g} (norm {float(truth[name].norm()):.1e}, run again "
            f"{relative_error(repeated[name], truth[name]):.1g})"
            for name in wrong[:4]
        ]
        pytest.fail(f"{len(wrong)} of {len(errors)} gradients are wrong: {'; '.join(lines)}", pytrace=False)


def settings(*usual: bool) -> Any:
    """Every mixer with the `usual` two switches of a test, and the default mixer with all others."""
    others = [values for values in itertools.product([False, True], repeat=2) if values != usual]
    return [*((mixer, *usual) for mixer in MIXERS), *(("gated_deltanet", *values) for values in others)]


@pytest.fixture
def models(mixer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    changed: dict[str, Any] = {**SHAPE, **LARGER}
    monkeypatch.setattr("support.tiny_run.SHAPE", changed)
    heads = {"heads": ["softmax", "linear"]} if mixer == "mixed_heads" else {}
    make_models(tmp_path, mixer=mixer, **heads)
    return tmp_path


def refused(mixer: str, models: Path, compiled: bool, graphs: bool, isolate: bool) -> bool:
    """Whether these settings do not fit together; checks the error that says so."""
    if not (graphs and isolate and mixer in READS_LENGTHS):
        return False
    with pytest.raises(RuntimeError, match=r"engine\.cuda_graphs: false"):
        gradients(models, compiled, True, True)
    return True


@pytest.mark.parametrize(("mixer", "isolate", "alone"), settings(True, False))
def test_a_replayed_graph_gives_eager_gradients(mixer: str, models: Path, isolate: bool, alone: bool) -> None:
    if refused(mixer, models, False, True, isolate):
        return
    plain = gradients(models, False, False, isolate, alone)
    replayed = gradients(models, False, True, isolate, alone)
    assert_close(replayed, plain, lambda: gradients(models, False, False, isolate, alone))


@pytest.mark.parametrize(("mixer", "isolate", "graphs"), settings(False, True))
def test_compiled_layers_give_eager_gradients(mixer: str, models: Path, isolate: bool, graphs: bool) -> None:
    """In float32. In bfloat16, different places of rounding change single gradients of this model by their size."""
    if refused(mixer, models, True, graphs, isolate):
        return
    plain = gradients(models, False, False, isolate, precision="fp32")
    compiled = gradients(models, True, graphs, isolate, precision="fp32")
    assert_close(compiled, plain, lambda: gradients(models, False, False, isolate, precision="fp32"))


@pytest.mark.parametrize(("mixer", "isolate", "graphs"), settings(True, False))
def test_compiled_layers_are_as_exact_as_eager_ones(mixer: str, models: Path, isolate: bool, graphs: bool) -> None:
    """In bfloat16, by the geometric mean of the errors of all gradients against float32."""
    if refused(mixer, models, True, graphs, isolate):
        return
    truth = gradients(models, False, False, isolate, precision="fp32")
    means = []
    for found in (gradients(models, False, False, isolate), gradients(models, True, graphs, isolate)):
        assert found.keys() == truth.keys(), f"gradients on one side only: {sorted(found.keys() ^ truth.keys())}"
        errors = torch.tensor([relative_error(found[name], grad) for name, grad in truth.items()])
        means.append(float(errors.clamp(min=1e-9).log().mean().exp()))
    assert means[1] < 1.5 * means[0], f"mean error {means[1]:.2g} compiled, {means[0]:.2g} eager"
