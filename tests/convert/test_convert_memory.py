"""The estimate of a conversion's memory against measured peaks and what torch's allocator gives out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltanet_convert.calibration_text import sequence_length
from deltanet_convert.job import prepare
from deltanet_convert.layer_step import LayerStep
from deltanet_convert.layer_stream import LayerStream
from deltanet_convert.memory_estimate import ConversionMemory, conversion_memory
from deltanet_convert.meta_model import meta_model
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import gate_fit
from deltanet_hf import LayerTable, converted_config
from deltanet_hf.evaluation.speed.random_models import SHAPES
from deltanet_hf.models.factory import model_class
from measuring.benchmarks.random_teacher import write_teacher
from support.allocated import peak_bytes
from support.tiny_conversion import PLAIN

WORKSPACE = 13_000_000  # of the operators, which work on blocks of one size
QUARTER = 0.25
SMALL = {**SHAPES["135M"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
SMALL = {**SMALL, "num_attention_heads": 16, "num_key_value_heads": 8}
LARGE = {**SHAPES["8B"], "vocab_size": 32000, "num_hidden_layers": 2}
WINDOW, PURE = "gated_deltanet+window", "gated_deltanet"
MEASURED = [
    (SHAPES["135M"], WINDOW, 8192, 0.93),
    (SMALL, PURE, 8192, 1.11),
    (SHAPES["1B"], PURE, 2048, 1.64),
    (LARGE, WINDOW, 128, 1.43),
]
"""Shape, mixer, calibration tokens, and the resident memory in GB (docs/research/conversion.md)."""


@pytest.mark.parametrize(("shape", "mixer", "tokens", "gb"), MEASURED)
def test_the_estimate_is_within_a_quarter_of_conversions_on_a_cpu(
    shape: dict[str, Any], mixer: str, tokens: int, gb: float
) -> None:
    peak = estimate(LlamaConfig(**shape), LayerTable.preset(shape["num_hidden_layers"], mixer), tokens).peak
    assert peak / 1e9 == pytest.approx(gb, rel=QUARTER)


def estimate(config: Any, table: LayerTable, tokens: int) -> ConversionMemory:
    model: Any = meta_model(LlamaForCausalLM, config, torch.bfloat16)
    student: Any = meta_model(model_class("llama"), converted_config(config, table), torch.bfloat16)
    teacher: Any = SimpleNamespace(config=config, model=model, dtype=torch.bfloat16)
    attentions = [layer.self_attn for layer in student.model.layers]
    return conversion_memory(teacher, attentions, sequence_length(table, config), tokens)


@pytest.mark.parametrize(("mixer", "row"), [(PURE, 512), (WINDOW, 2048)])
def test_a_layer_takes_what_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixer: str, row: int) -> None:
    monkeypatch.setattr(gate_fit, "STEPS", 4)
    monkeypatch.setattr(gate_fit, "STRENGTHS", (0.1,))
    monkeypatch.setattr(gate_fit, "HALF_LIVES", (8.0, 32.0))
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=1000, head_dim=64)
    write_teacher(tmp_path / "teacher", config)
    options = ConvertOptions(**{**PLAIN, "calibration_tokens": 4096, "device": "cpu", "mixer": mixer})
    job = prepare(str(tmp_path / "teacher"), tmp_path / "out", options)
    stream = LayerStream(job.teacher)
    stream.learn_arguments(row)
    step = LayerStep(stream, job.plan.student, torch.float32, 0, torch.device("cpu"))
    found = peak_bytes(lambda: step.fit(step.begin(0, torch.randn(4096 // row, row, 192))))
    assert estimate(config, job.table, 4096).layer == pytest.approx(found, abs=QUARTER * found + WORKSPACE)
    assert found > 2 * WORKSPACE


def test_the_head_takes_its_weights_twice_or_the_logits() -> None:
    table, logits = LayerTable.preset(1), 5 * 128 * 50_000 * 4
    for hidden, head in ((192, 2 * 50_000 * 192 + logits), (1536, 2 * (2 * 50_000 * 1536))):
        config = LlamaConfig(hidden_size=hidden, num_hidden_layers=1, num_attention_heads=6, vocab_size=50_000)
        assert estimate(config, table, 1024).head == head
