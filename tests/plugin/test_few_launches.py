"""Prompts of converted models on a GPU take few kernels: the same results, and modules as before."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache

from deltanet_hf.decoding import join_projections
from deltanet_hf.decoding.few_launches import few_launches
from deltanet_hf.decoding.fused_mlps import CLASSES, is_known
from deltanet_hf.decoding.obstacles import wiring
from deltanet_hf.models.families import FAMILIES
from support.tiny_models import tiny_student, tiny_teacher

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(6)).to(DEVICE)
OWN = {"phi3", "gemma2", "gemma3_text"}  # one projection for both, or another activation


def mlps(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("MLP")]


@torch.no_grad()
def read(model: Any) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in TOKENS.split([7, 4, 1], dim=1)]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_5_text"])
def test_blocks_of_every_family(family: str) -> None:
    model = tiny_student(family).to(DEVICE)
    assert all(is_known(block) == (family not in OWN) for block in mlps(model))
    with torch.enable_grad():  # the family's own modules
        wanted = model(TOKENS).logits.detach()
    for joint in (False, True):
        if joint:
            join_projections(model)
        with torch.no_grad(), few_launches(model):
            torch.testing.assert_close(model(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_class_of_that_name_elsewhere_is_not_known() -> None:
    block = mlps(tiny_teacher("llama"))[0]
    assert type(block).__name__ in CLASSES
    block.__class__ = type("LlamaMLP", (type(block),), {"__module__": "mine"})
    assert not is_known(block)


def test_joint_projections_are_one_product() -> None:
    model = tiny_teacher("llama")
    join_projections(model)
    block: Any = mlps(model)[0]
    gate, up = block.gate_proj.weight, block.up_proj.weight
    assert up.data_ptr() == gate.data_ptr() + gate.numel() * gate.element_size()


def test_calls_leave_no_trace() -> None:
    model = tiny_student("llama").to(DEVICE)
    read(model)  # joins projections on a GPU
    before = wiring(model)
    read(model)
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError)), few_launches(model):
        model(inputs_embeds=torch.zeros(1, 3, 5, device=DEVICE))
    assert wiring(model) == before
    with torch.no_grad(), few_launches(model), few_launches(model):
        model(TOKENS)
    assert wiring(model) == before


def test_with_gradients_nothing_changes() -> None:
    model = tiny_student("llama").to(DEVICE)
    with few_launches(model):
        model(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hooks_and_adapters_are_honoured() -> None:
    model, seen = tiny_student("llama").to(DEVICE), []
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)).eval()
    base = adapted.get_base_model()
    block: Any = mlps(base)[0]
    block.gate_proj.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    with torch.enable_grad():
        wanted = base(TOKENS).logits.detach()
    seen.clear()
    with torch.no_grad(), few_launches(base):
        torch.testing.assert_close(base(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)
    assert seen == [1]


def test_the_signature_is_the_family_s() -> None:
    model, teacher = tiny_student("llama"), tiny_teacher("llama")
    assert inspect.signature(model.forward) == inspect.signature(teacher.forward)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
def test_on_a_gpu_prompts_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltanet_hf.decoding import few_launches as module

    model, calls = tiny_student(family, window=5, sinks=2).to(DEVICE), []
    real = module.few_launches
    monkeypatch.setattr(module, "few_launches", lambda model: (calls.append(1), real(model))[1])
    found = read(model)
    assert len(calls) == 3
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # the family's own modules, separate operations
    torch.testing.assert_close(read(model), found, rtol=1e-4, atol=1e-4)
