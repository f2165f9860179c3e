"""The parts of the expected memory: against measured runs, counted tensors, and settings that change them."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.evaluation.speed.random_models import SHAPES
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_recipes.config import read_recipe
from deltanet_recipes.schema import Recipe, stage_name
from deltanet_recipes.training.adapters import train_for
from deltanet_recipes.training.estimate import LOGIT_BYTES, MUON_BYTES, Memory, estimates
from deltanet_recipes.training.losses import ChunkedLoss, Head, KlTerms, live_chunk
from deltanet_recipes.training.model_pair import load_student, load_teacher, mixers
from deltanet_recipes.training.optim import make_optimizers, parameter_groups
from deltanet_recipes.training.runtime import Runtime
from measuring.benchmarks.large_models import RECIPES
from support.tiny_run import ALIGN, DISTIL, make_workplace, tiny_recipe

GEMMA = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
}
QUARTER = 0.25


def meta_student(shape: dict[str, Any], family: str = "llama", softmax: Any = (), **settings: Any) -> PreTrainedModel:
    """A student of real shape without memory, in bfloat16 as students are stored."""
    config = FAMILIES[family].config_class(**shape)
    table = LayerTable.preset(config.num_hidden_layers, softmax=softmax, **settings)
    with torch.device("meta"):
        student: PreTrainedModel = model_class(family)(converted_config(config, table))
    return student.to(torch.bfloat16)


def machine(device: str, world: int = 1) -> Any:
    """The part of a `Runtime` that an estimate reads, without the engine."""
    gpu = device == "cuda"
    return SimpleNamespace(world=world, bf16=gpu, compile=gpu, device=torch.device(device))


def memory(recipe: Recipe, stage: str, student: PreTrainedModel, runtime: Any = None) -> Memory:
    """The parts of the estimate for the stage of this name."""
    runtime = runtime or machine("cuda")
    runtime.engine = recipe.engine
    found = estimates(recipe.stages, student, runtime, holdout_tokens=0)
    return next(each.peak for one, each in zip(recipe.stages, found, strict=True) if stage_name(one) == stage)


FULL = ["stages.distil.train=full"]
FIRST = [
    ("smollm2-135m-pure", FULL, "align", 3.0),
    ("smollm2-135m-pure", FULL, "distil", 7.5),
    ("smollm2-135m-pure-100m", FULL, "distil", 17.0),
]
"""GiB on an H200 while a graph was captured, before the optimiser had a state. That of alignment is less what it held
then but no longer holds: the student's other layers, and the hidden states between the teacher's."""
WHOLE = [
    ("smollm2-135m-pure-100m", FULL, "distil", 20.0),
    ("smollm2-135m", [], "long", 9.5),
    ("gemma-3-270m-32k", ["stages.long.hidden_weight=1.0"], "long", 19.2),
    ("gemma-3-270m-32k", ["stages.32k.hidden_weight=1.0"], "32k", 38.3),
]
"""GiB with the optimiser's state and the memory of the graph, on an H200, of Gemma on an H100."""


def shipped(name: str) -> PreTrainedModel:
    """The student of a shipped recipe for a small model."""
    if name.startswith("gemma"):
        return meta_student(GEMMA, "gemma3_text", softmax=range(17), mixer="window")
    return meta_student(SHAPES["135M"], mixer="gated_deltanet+window" if name == "smollm2-135m" else "gated_deltanet")


@pytest.mark.parametrize("with_state", [False, True])
def test_the_estimate_is_within_a_quarter_of_runs(with_state: bool) -> None:
    for name, changes, kind, gib in WHOLE if with_state else FIRST:
        peak = memory(read_recipe(name, changes), kind, shipped(name))
        assert (peak.total - peak.optimizer * (not with_state)) / 2**30 == pytest.approx(gib, rel=QUARTER), name


SHORT = "stages.distil.batch_tokens"
THEN = ["stages.distil.optimizer.name=adamw", "stages.distil.hidden_weight=0"]
SHARED = "engine.sharding=fsdp2"
LARGE = [
    ("1B", ["stages.align.micro_batch_rows=16"], "align", 1, 25.2),
    ("1B", THEN, "distil", 1, 28.4),
    ("8B", ["stages.align.batch_tokens=4096"], "align", 1, 2.2),
    ("8B", [f"{SHORT}=4096"], "distil", 1, 63.9),
    ("8B", [SHARED, f"{SHORT}=8192"], "distil", 2, 34.4),
    ("8B", [SHARED, "stages.long.batch_tokens=16384"], "long", 2, 43.5),
]
"""Peaks of `large_models` in GiB with their evaluation, for students without windows, projections trained in full.
That of layerwise alignment is its first layer's: later ones still had what the layers before had recorded."""


def test_the_estimate_is_within_a_quarter_of_large_models_on_h200s() -> None:
    in_full = [f"stages.{stage}.optimizer.projection_lr=1.0e-4" for stage in ("align", "distil", "long")]
    for shape, changes, kind, world, gib in LARGE:
        layers, size = {"1B": (16, 64), "8B": (32, 128)}[shape]
        student = meta_student(SHAPES[shape], softmax=range(3, layers, 4), output_gate_rank=size)
        peak = memory(read_recipe(RECIPES[shape], [*changes, *in_full]), kind, student, machine("cuda", world))
        assert peak.total / 2**30 == pytest.approx(gib, rel=QUARTER), (shape, changes)


SMALL = {**SHAPES["135M"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
SMALL = {**SMALL, "num_attention_heads": 16, "num_key_value_heads": 8}
WINDOWS = {**SHAPES["135M"], "num_hidden_layers": 6, "vocab_size": 64}
LONG = {"sequence_length": 1024, "batch_tokens": 2048}
ON_CPU: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], float]] = [
    (SHAPES["1B"], {"softmax": range(3, 16, 4)}, {"kind": "distil", "sequence_length": 64}, 14.9),
    (
        SHAPES["135M"],
        {"mixer": "gated_deltanet+window"},
        {"kind": "distil", "batch_tokens": 1024, "loss_chunk": 256},
        6.7,
    ),
    (WINDOWS, {"mixer": "window"}, {"kind": "distil", "cache_bits": 4, **LONG}, 2.7),
    (SMALL, {}, {"kind": "distil", "sequence_length": 256}, 2.3),
    (SMALL, {}, {"kind": "distil", "sequence_length": 256, "train": "full"}, 2.9),
    (SMALL, {}, {"kind": "align", "batch_tokens": 1024}, 2.0),
]
"""Shape, conversion, stage, and the resident memory in GiB (docs/research/training.md)."""


def test_the_estimate_is_within_a_quarter_of_runs_on_a_cpu() -> None:
    for shape, settings, given, gib in ON_CPU:
        stage = {"tokens": 10000, "batch_tokens": given.get("sequence_length", 512), **given}
        data = {"isolate_documents": False}
        recipe = Recipe.model_validate({"student": "s", "output": "o", "data": data, "stages": [stage]})
        peak = memory(recipe, stage["kind"], meta_student(shape, **settings).float(), machine("cpu"))
        assert peak.total / 2**30 == pytest.approx(gib, rel=QUARTER), given


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("memory"), layers=(0, 2))


def nbytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


@pytest.mark.parametrize(
    ("train", "optimizer", "precision"),
    [
        ("lora", "adamw", "fp32"), ("lora", "muon", "bf16"), ("full", "muon", "fp32"), ("full", "adamw", "bf16"),
        ("frozen", "adamw", "bf16"), ("frozen", "muon", "fp32"),
    ],
)  # fmt: skip
def test_weights_gradients_and_state_are_those_of_the_tensors(
    workplace: Path, tmp_path: Path, train: str, optimizer: str, precision: str
) -> None:
    stage = {**DISTIL, "train": train, "optimizer": {"name": optimizer}}
    recipe = tiny_recipe(workplace, tmp_path / "run", stage, engine={"device": "cpu", "precision": precision})
    runtime = Runtime(recipe.engine)
    student, teacher = load_student(recipe.student), load_teacher(recipe, runtime.compute_dtype)
    found = memory(recipe, "distil", student, runtime)
    train_for(student, recipe.stages[0], seed=0)  # type: ignore[arg-type]
    trained = [p for p in student.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.ones_like(p)
    settings = recipe.stages[0].optimizer
    optimizers = make_optimizers(parameter_groups(student, settings), fused=False)
    states = []
    for each in optimizers:
        each.step()
        states += [t for state in each.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]
    single = [p for p in student.parameters() if p.dtype == torch.float32]
    copies = 2 * sum(p.numel() for p in single) if precision == "bf16" else 0  # made while the model runs
    assert found.weights - copies == pytest.approx(nbytes([*student.parameters(), *teacher.parameters()]), rel=0.02)
    assert found.gradients == nbytes(p.grad for p in trained)
    extra = 0
    if optimizer == "muon":  # an update holds all matrices of one shape
        shapes = [(p.shape, p.numel()) for p in trained if p.dim() == 2 and min(p.shape) > 16]
        extra = MUON_BYTES * max(sum(n for shape, n in shapes if shape == other) for other, _ in shapes)
    assert found.optimizer - extra == pytest.approx(nbytes(states), rel=0.02)


def test_weights_that_a_stage_merged_stay_in_float32() -> None:
    student = meta_student(SHAPES["1B"], softmax=range(3, 16, 4))
    stages = [{**DISTIL, "kind": kind, "lora_rank": 64} for kind in ("distil", "long")]
    recipe = Recipe.model_validate({"student": "s", "output": "o", "stages": stages})
    first, second = (memory(recipe, kind, student).weights for kind in ("distil", "long"))
    mlps, attention = 16 * 3 * 2048 * 8192, 4 * (2 * 2048 * 2048 + 2 * 2048 * 512) + 12 * 4 * 2048 * 2048
    assert second - first == (4 - 2 + 2) * (mlps + attention)  # float32, and their copies in bfloat16


class PeakMode(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def test_logits_take_what_one_chunk_takes_however_many_tokens_there_are() -> None:
    vocabulary, chunk = 4096, 64
    weight = torch.randn(vocabulary, 16, dtype=torch.bfloat16)
    peaks = []
    for tokens in (chunk, 4 * chunk):
        hidden = torch.randn(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
        given = torch.randn(tokens, 16, dtype=torch.bfloat16)
        with PeakMode() as mode:
            loss = live_chunk(Head(), Head(), KlTerms())
            ChunkedLoss.apply(loss, chunk, hidden, weight, torch.zeros(tokens, dtype=torch.long), (given,), weight)
        peaks.append(mode.peak)
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[0] == pytest.approx(LOGIT_BYTES[False] * vocabulary * chunk, rel=0.05)


@pytest.mark.parametrize(("mode", "precision"), [("joint", "bf16"), ("layerwise", "fp32"), ("layerwise", "bf16")])
def test_on_a_cpu_an_align_stage_has_both_models_and_the_libraries(
    workplace: Path, tmp_path: Path, mode: str, precision: str
) -> None:
    stage = {**ALIGN, "mode": mode, "optimizer": {"projection_lr": 1e-3}}
    recipe = tiny_recipe(workplace, tmp_path / "run", stage, engine={"device": "cpu", "precision": precision})
    runtime = Runtime(recipe.engine)
    student = load_student(recipe.student, None if runtime.bf16 else torch.float32)
    teacher = load_teacher(recipe, runtime.compute_dtype)
    peak = memory(recipe, "align", student, runtime)
    train_for(student, recipe.stages[0], seed=0)
    runs = next(iter(mixers(student).values())) if mode == "layerwise" else student
    copies = 2 * sum(p.numel() for p in runs.parameters() if p.requires_grad) if runtime.bf16 else 0
    assert peak.weights - copies == pytest.approx(nbytes([*student.parameters(), *teacher.parameters()]), rel=0.02)
    assert peak.process > 500 * 2**20
    models = nbytes([*load_student(recipe.student, student.dtype).parameters(), *teacher.parameters()])
    assert peak.total >= peak.process + 0.98 * models


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_weights_loaded_in_float32_leave_their_files(workplace: Path, tmp_path: Path) -> None:
    """Parameters that are stored in float32 beside bfloat16 weights would keep the pages of the whole file."""
    model = load_student(str(workplace / "student"))
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in FLOAT32_NAMES:
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(tmp_path / "student")
    model = load_student(str(tmp_path / "student"), torch.float32)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_the_parts_follow_the_settings() -> None:
    student = meta_student(SHAPES["8B"], softmax=range(3, 32, 4))
    shared = "engine.sharding=fsdp2"
    name = "llama-3.1-8b"

    def peak(kind: str, *changes: str, world: int = 1) -> Memory:
        return memory(read_recipe(name, changes), kind, student, machine("cuda", world))

    base = peak("distil")
    kept = peak("distil", "engine.gradient_checkpointing=false")
    assert base.total < kept.total < 110 * 2**30  # rows of 4,096 by LoRA fit one GPU of 141 GB
    assert kept.activations > 8 * base.activations
    half = "stages.distil.loss_chunk=512"
    assert peak("distil", half).logits == base.logits / 2
    assert peak("long").activations == pytest.approx(2 * base.activations, rel=0.01)
    hidden = peak("distil", "stages.distil.hidden_weight=1")
    assert hidden.activations - base.activations == 32 * 4096 * 4096 * 2
    outside = 2 * 128256 * 4096 * 2  # of the teacher, on each GPU
    (one, two, four) = (peak("distil", *[shared][: world - 1], world=world).weights - outside for world in (1, 2, 4))
    assert two - four == pytest.approx(one / 4, rel=0.01)
    assert two > one / 2 + outside  # that of the student is gathered
    assert peak("distil", shared, world=2).gradients == base.gradients / 2
    joint = ["stages.align.mode=joint", "stages.align.cached_tokens=null"]
    plain, again = (peak("align", *joint, f"engine.gradient_checkpointing={on}") for on in ("false", "true"))
    assert again.activations < plain.activations / 4
