"""The dtype in which models compute on a CPU with and without instructions for bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from deltanet_convert.export import runtime_check
from deltanet_convert.export.runtimes import BFLOAT16, FLOAT32, STORED, MlxLm, Transformers, Vllm
from deltanet_hf import cpu_dtype
from deltanet_hf.cpu_dtype import loading_dtype, native_bfloat16
from deltanet_hf.evaluation.report.model_rows import ModelRow, ModelRows
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.generate import load_for_inference
from deltanet_recipes.schema_sections import Engine
from deltanet_recipes.training.runtime import Runtime

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def folder(student_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A converted model whose weights are stored in bfloat16."""
    folder = tmp_path_factory.mktemp("stored")
    AutoModelForCausalLM.from_pretrained(student_folder, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_native_means_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, native in (
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"bf16": True, "neon": True}, True),
        ({"avx512_f": True, "avx512_bf16": False, "avx_ne_convert": True}, False),
        ({"neon": True}, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        assert native_bfloat16.__wrapped__() is native


def test_this_cpu_is_recognised_by_its_flags() -> None:
    try:
        found = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("no /proc/cpuinfo")
    flags = next(line.split() for line in found.splitlines() if line.startswith(("flags", "Features")))
    assert native_bfloat16() is any(name in flags for name in cpu_dtype.INSTRUCTIONS)


def test_only_auto_on_a_cpu_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "native_bfloat16", lambda: False)
    assert loading_dtype("auto", CPU) == "float32"
    assert loading_dtype("auto", GPU) == "auto"
    assert loading_dtype("bfloat16", CPU) == "bfloat16"
    monkeypatch.setattr(cpu_dtype, "native_bfloat16", lambda: True)
    assert loading_dtype("auto", CPU) == "auto"


@pytest.mark.parametrize(("native", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_every_command_loads_in_this_dtype(
    folder: str, native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_dtype, "native_bfloat16", lambda: native)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = ModelRows([ModelRow("teacher", "teacher", folder)], "cpu", "auto")
    models = [load_for_inference(folder)[0], rows.teacher, DeltaNetLM(folder, device="cpu").model]
    for model in models:
        assert model.lm_head.weight.dtype == dtype
        assert model.model.layers[0].self_attn.q_proj.weight.dtype == dtype
    assert rows.dtype == ("auto" if native else "float32")
    assert Runtime(Engine(device="cpu")).compute_dtype == torch.float32


def test_a_choice_of_the_user_is_kept(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dtype, "native_bfloat16", lambda: False)
    assert load_for_inference(folder, "bfloat16", "cpu")[0].lm_head.weight.dtype == torch.bfloat16
    chosen: Any = DeltaNetLM(folder, device="cpu", dtype="bfloat16").model
    assert chosen.lm_head.weight.dtype == torch.bfloat16
    assert Runtime(Engine(device="cpu", precision="bf16")).compute_dtype == torch.bfloat16


def test_an_export_is_not_checked_in_emulated_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_check, "native_bfloat16", lambda: False)
    modes = runtime_check.modes_to_run
    assert modes(Transformers, torch.bfloat16) == [FLOAT32]
    assert modes(MlxLm, torch.bfloat16) == [FLOAT32, STORED]  # not computed by PyTorch
    assert modes(Vllm, torch.bfloat16) == [BFLOAT16]  # has no other
    monkeypatch.setattr(runtime_check, "native_bfloat16", lambda: True)
    assert modes(Transformers, torch.bfloat16) == [FLOAT32, STORED]
    assert modes(Transformers, torch.float32) == [FLOAT32]
