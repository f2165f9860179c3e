"""Offloaded weights: every kind of layer reads its parameters only where the hooks have brought them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM, DynamicCache

from deltanet_hf.mixers import MIXERS
from support.tiny_models import mixed_mixture_table, tiny_mixture, tiny_student

IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(9))
BESIDE: dict[str, Any] = {"window": 4, "sinks": 1}
QUICK = ("window", "kda", "mesa+window", "titans", "fox", "path")  # one of each way to keep parameters
KINDS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*MIXERS, "kda+window", "mesa+window")
    if name != "mixed_heads"  # below
]


def logits(model: Any) -> torch.Tensor:
    """Of a padded prefill and of two decoding steps."""
    cache, found = DynamicCache(config=model.config), []
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for columns in (slice(0, 10), slice(10, 11), slice(11, 12)):
        given = {"attention_mask": mask[:, : columns.stop], "past_key_values": cache, "use_cache": True}
        found.append(model(IDS[:, columns], **given).logits)
    return torch.cat(found, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("mixer", KINDS)
def test_every_kind_of_layer_computes_the_same(mixer: str) -> None:
    changes = BESIDE if "+window" in mixer else {}
    model = tiny_student("llama", layers=(1,), mixer=mixer, **changes)
    wanted = logits(model)
    offloaded = cpu_offload(model, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(logits(offloaded), wanted)


@torch.no_grad()
def test_mixed_heads_on_the_disk(tmp_path: Path) -> None:
    """Softmax heads, windows and states in one layer."""
    model = tiny_mixture("gemma2", mixed_mixture_table())
    model.save_pretrained(tmp_path / "model")
    resident = ("model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.1", "lm_head")
    places = dict.fromkeys(resident, "cpu") | {f"model.layers.{index}": "disk" for index in (0, 2, 3)}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    torch.testing.assert_close(logits(offloaded), logits(model), rtol=1e-4, atol=1e-4)
