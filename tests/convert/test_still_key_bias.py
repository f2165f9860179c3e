"""Biases of keys in channels that hardly turn are left out where keys have few bits, and nowhere else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from deltanet_hf.models import cache_bits
from deltanet_hf.models.cache_bits import set_cache_bits
from support.tiny_conversion import teacher_folder, tiny_conversion
from support.tiny_models import tiny_teacher

IDS = torch.randint(4, 60, (2, 100), generator=torch.Generator().manual_seed(0))
ROPE = {"rope_type": "default", "rope_theta": 1e8}
STILL = [2, 3, 6, 7]  # the channels of two of four pairs, which turn by 0.013 and 0.0001 radian over 128 positions


def biases(model: Any) -> Tensor:
    """[layers, heads, 8]"""
    return torch.stack([layer.self_attn.k_proj.bias.view(-1, 8) for layer in model.model.layers])


@pytest.fixture
def teacher() -> Any:
    """A model whose keys lie far from zero in two of the channels `STILL`."""
    model = tiny_teacher("qwen2", rope_parameters=ROPE)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.view(-1, 8)[:, [3, 7]] += torch.tensor([300.0, -200.0])
    return model


@torch.no_grad()
def test_softmax_does_not_see_it_and_keys_in_4_bits_do(teacher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, before = teacher(IDS).logits, biases(teacher).clone()

    def error(model: Any) -> float:
        return float((model(IDS).logits - wanted).norm() / wanted.norm())

    found = set_cache_bits(copy.deepcopy(teacher), 4)
    assert torch.equal(biases(found), before.index_fill(2, torch.tensor(STILL), 0.0))
    small = error(found)
    assert error(set_cache_bits(found, 16)) < 0.02
    monkeypatch.setattr(cache_bits, "drop_still_key_bias", lambda *args: None)
    assert small < 0.1 < 0.3 < error(set_cache_bits(teacher, 4))


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_scores_beside_learned_sinks_and_channels_that_turn_keep_it(family: str) -> None:
    """The slowest channels of this Llama turn by more than a radian."""
    model = tiny_teacher(family)
    before = [layer.self_attn.k_proj.bias.clone() for layer in model.model.layers]
    set_cache_bits(model, 4)
    assert all(map(torch.equal, before, (layer.self_attn.k_proj.bias for layer in model.model.layers)))


@pytest.mark.parametrize(("bits", "context"), [(4, None), (16, None), (4, "2k")])
def test_a_conversion_leaves_it_out_where_its_keys_have_few_bits(
    teacher: Any, bits: int, context: str | None, tmp_path: Path
) -> None:
    """Over 2,048 positions, a pair of `STILL` would turn by 0.2 radian without YaRN."""
    teacher.save_pretrained(folder := teacher_folder(tmp_path / "teacher", "qwen2"))
    options = {"layers": "layers:1", "mixer": "gated_deltanet+window", "changes": ["window=33"], "context": context}
    tiny_conversion(folder, tmp_path / "student", cache_bits=bits, **options)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float32)
    wanted = biases(teacher) if bits == 16 else biases(teacher).index_fill(2, torch.tensor(STILL), 0.0)
    assert torch.equal(biases(student), wanted)
