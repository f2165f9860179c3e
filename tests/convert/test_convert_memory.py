"""The estimate of a conversion's memory against what torch's allocator gives out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from deltanet_convert.conversion_plan import make_plan
from deltanet_convert.job import prepare
from deltanet_convert.layer_step import LayerStep
from deltanet_convert.layer_stream import LayerStream
from deltanet_convert.memory_estimate import _LayerSizes, conversion_memory
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import gate_fit
from deltanet_convert.teacher_model import open_teacher
from deltanet_hf import LayerTable
from measuring.benchmarks.random_teacher import write_teacher
from support.allocated import peak_bytes

WORKSPACE = 13_000_000  # of the operators, which work on blocks of one size


def teacher(folder: Path, layers: int = 1, vocabulary: int = 1000, **shape: Any) -> Path:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, **shape}, num_hidden_layers=layers, vocab_size=vocabulary, head_dim=64)
    write_teacher(folder, config)
    return folder


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"mixer": "gated_deltanet"}, 2048),
        ({"mixer": "gated_deltanet+window"}, 2048),
        ({"profile": "qwen3_5", "layers": "keep:0"}, 512),  # the kept layer gets q/k norms
    ],
)
def test_a_fit_takes_what_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], tokens: int
) -> None:
    monkeypatch.setattr(gate_fit, "STEPS", 4)
    monkeypatch.setattr(gate_fit, "STRENGTHS", (0.1,))
    monkeypatch.setattr(gate_fit, "HALF_LIVES", (8.0, 32.0))
    job = prepare(
        str(teacher(tmp_path / "teacher", layers=2)),
        tmp_path / "out",
        ConvertOptions(calibration_tokens=tokens, device="cpu", **options),
    )
    row = 2048 if "window" in str(options) else 512
    stream = LayerStream(job.teacher)
    stream.learn_arguments(row)
    new: Any = job.plan.student.model.layers[0].self_attn  # type: ignore[union-attr, index]
    old: Any = job.teacher.model.model.layers[0]  # type: ignore[union-attr, index]
    sizes = _LayerSizes(job.teacher, old, new, row, tokens)
    estimate = 4 * sum(p.numel() for p in new.parameters()) + sizes._fit(new, 0)
    step = LayerStep(stream, job.plan.student, torch.float32, 0, True, torch.device("cpu"))
    work = step.begin(0, torch.randn(tokens // row, row, 192))
    found = peak_bytes(lambda: step.fit(work))
    assert estimate == pytest.approx(found, abs=0.1 * found + WORKSPACE)
    assert found > 2 * WORKSPACE


def test_the_head_takes_its_weights_twice_or_the_logits(tmp_path: Path) -> None:
    opened = open_teacher(teacher(tmp_path / "teacher", vocabulary=50_000))
    memory = conversion_memory(opened, [None], 512, 1024)
    logits = 5 * 128 * 50_000 * 4
    assert memory.head == 2 * 50_000 * 192 + logits
    wide = open_teacher(teacher(tmp_path / "wide", vocabulary=50_000, hidden_size=1536))
    assert conversion_memory(wide, [None], 512, 1024).head == 2 * (2 * 50_000 * 1536)


def test_layers_that_wait_in_line_are_counted(tmp_path: Path) -> None:
    opened = open_teacher(teacher(tmp_path / "teacher", layers=6))
    plan = make_plan(opened, LayerTable.preset(6, softmax=(0, 2, 3, 5)), torch.bfloat16, 10**9, 2048)
    modules: Any = plan.student.model.layers  # type: ignore[union-attr]
    new = [None if index in (0, 2, 3, 5) else module.self_attn for index, module in enumerate(modules)]
    memory = conversion_memory(opened, new, 512, 2048)
    mlp, attention, stream = 2 * (3 * 192 * 512 + 2 * 192), 4 * 2 * 192 * (6 + 2) * 64, 4 * 2048 * 192
    assert memory.waiting == 2 * (mlp + attention + stream)  # layers 2 and 3
    assert memory.peak(2) - memory.peak(1) == 2 * memory.more + memory.waiting - memory.layer
