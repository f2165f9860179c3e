"""The order in which keys of 4 bits are packed: how it is measured, and that converted models have it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltanet_convert.convert_command import convert_command
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start.key_order import measured_key_order, order_by, set_key_order
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.layers import LayerTable
from deltanet_kernels.packed_cache.layout import GROUP, key_bits
from support.blank_layers import layer_inputs
from support.tiny_conversion import teacher_folder, tiny_conversion, tiny_job
from support.tiny_models import mixed_table, tiny_mixture, tiny_student, tiny_table, tiny_teacher
from tests.convert.test_convert_families import held_out_check, texts_of
from tests.convert.test_convert_heads import selection

IDS = torch.randint(4, 60, (1, 100), generator=torch.Generator().manual_seed(0))


def bits_of(order: torch.Tensor) -> torch.Tensor:
    """[HK, D] the bits of each channel."""
    return key_bits(order.shape[2], order.device).expand_as(order[:, 0]).gather(1, order[:, 1])


def test_the_heaviest_channels_have_the_most_bits() -> None:
    weights = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    order = order_by(weights)
    assert torch.equal(order[:, 0].gather(1, order[:, 1]), torch.arange(64).expand(3, -1))
    bits, ranks = bits_of(order), (-weights).argsort(1).argsort(1)
    assert torch.equal(bits, torch.where(ranks < 16, 5, torch.where(ranks < 48, 4, 3)))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_oss"])
@torch.no_grad()
def test_weights_are_of_the_queries_and_of_the_ranges_of_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head's query heads, of groups behind the first, and equal within a rotary pair."""
    teacher = tiny_teacher(family, attn_implementation="eager")
    attention, x, kwargs = layer_inputs(teacher, 1, 2)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    module: Any = __import__(type(attention).__module__, fromlist=["apply_rotary_pos_emb"])
    rotate = module.apply_rotary_pos_emb

    def kept(*args: Any, **options: Any) -> Any:
        seen.append(rotate(*args, **options))
        return seen[-1]

    monkeypatch.setattr(module, "apply_rotary_pos_emb", kept)
    x = torch.cat([x, x.flip(1), x], dim=1)[:, : 2 * GROUP + 5]
    kwargs["position_embeddings"] = teacher.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    before = attention.config
    order = measured_key_order(attention, x, kwargs | {"attention_mask": None})
    assert attention.config is before
    q, k = (torch.cat(parts) for parts in zip(*seen, strict=True))
    heads, size = k.shape[1], k.shape[3]
    energy = q.unflatten(1, (heads, -1)).square().mean((2, 3))  # [n, HK, D]
    group = k[:, :, GROUP : 2 * GROUP]
    weights = (energy * (group.amax(2) - group.amin(2)).square()).mean(0)
    rotated = round(size * getattr(teacher.config, "partial_rotary_factor", 1.0))
    pairs = weights[:, :rotated].unflatten(1, (2, -1)).mean(1)
    weights[:, :rotated] = torch.cat([pairs, pairs], dim=1)
    assert torch.equal(bits_of(order), bits_of(order_by(weights)))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_converted_models_have_an_order_for_each_head(tmp_path: Path, family: str) -> None:
    """With which, and in whose bits, the conversion measures them."""
    teacher = teacher_folder(tmp_path / "teacher", family)
    options: dict[str, Any] = {"mixer": "window", "changes": ("window=40",), "cache_bits": 4}
    options["layers"] = selection(tmp_path, family)
    job = tiny_job(teacher, tmp_path / "out", **options)
    report = tiny_conversion(teacher, tmp_path / "out", **options)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert LayerTable.of(model.config).key_order
    assert report["plan"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    found = {name: order for name, order in model.named_buffers() if name.endswith("key_order")}
    parts = [part for layer in model.model.layers for part in kind_of(layer.self_attn).softmax_parts]
    assert len(found) == len(parts) == 6
    for (part, heads), order in zip(parts, found.values(), strict=True):
        assert order is part.key_order
        assert order.shape == (heads, 2, part.head_dim)
        assert torch.equal(order[:, 0].sort(1).values, torch.arange(part.head_dim).expand(heads, -1))
        assert torch.equal(order[:, 1], order[:, 0].argsort(1))
    assert report["held_out"] == held_out_check(teacher, model, texts_of(job).held_out)
    logits = model(IDS).logits
    assert not torch.equal(logits, set_cache_bits(model, 8)(IDS).logits)


@torch.no_grad()
def test_whole_layers_can_have_an_order_alone(tmp_path: Path) -> None:
    """That of its keys on the calibration text, with weights as they were; other bits would change nothing."""
    teacher = teacher_folder(tmp_path / "teacher", "llama")
    options: dict[str, Any] = {"mixer": "window", "cache_bits": 4, "layers": "every:1"}
    ids = texts_of(tiny_job(teacher, tmp_path / "out", **options)).calibration
    tiny_conversion(teacher, tmp_path / "out", **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    even = AutoModelForCausalLM.from_pretrained(teacher)
    for index, layer in enumerate(model.model.layers):
        assert torch.equal(layer.self_attn.key_order, measured_key_order(*layer_inputs(even, index, ids=ids)))
    set_cache_bits(even, 4)
    assert model.state_dict().keys() - even.state_dict().keys() == {
        f"model.layers.{layer}.self_attn.key_order" for layer in range(4)
    }
    assert not torch.equal(model(IDS).logits, even(IDS).logits)
    assert torch.equal(set_cache_bits(model, 16)(IDS).logits, set_cache_bits(even, 16)(IDS).logits)
    with pytest.raises(UserError, match=r"--keep every:1: keeps all 4 layers; leave at least one .* --cache-bits 4"):
        tiny_conversion(teacher, tmp_path / "other", mixer="window", layers="every:1")


def test_heads_of_a_layer_keep_their_orders() -> None:
    """Taken by heads, and repeated where a window has more key/value heads than the teacher."""
    order = order_by(torch.rand(2, 16, generator=torch.Generator().manual_seed(0)))
    window = tiny_student("llama", mixer="window", window=9).model.layers[0].self_attn
    set_key_order(window, order)
    assert torch.equal(window.key_order, order)
    for kinds in (("window", "softmax"), ("softmax", "window")):
        mixed: Any = tiny_mixture("llama", mixed_table(*kinds)).model.layers[0].self_attn
        set_key_order(mixed, order)
        for head, kind in enumerate(kinds):
            assert torch.equal(getattr(mixed, kind).key_order, order[head : head + 1])
    wide: Any = tiny_student("llama", window=9, expand_kv=True).model.layers[0].self_attn
    set_key_order(wide, order)
    heads = wide.window_branch.kv_heads
    assert torch.equal(wide.window_branch.key_order, order.repeat_interleave(heads // 2, 0))
    assert not isinstance(wide, MixedHeads)


def test_keys_of_other_bits_and_of_exports_have_no_order() -> None:
    assert not ConvertOptions(cache_bits=8).table(1, ()).key_order
    assert not ConvertOptions(profile="qwen3_5", cache_bits=4).table(1, ()).key_order


@pytest.mark.parametrize("size", [12, 80])
def test_heads_that_have_no_form_in_4_bits_keep_16_unless_4_are_asked_for(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = teacher_folder(tmp_path / "teacher", "llama", head_dim=size)
    convert_command(str(teacher), tmp_path / "out", dry_run=True, as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["cache_bits"] == 16
    assert f"Heads of {size} channels have no form in 4 bits: the cache has 16." in shown.err
    with pytest.raises(UserError, match=f"--cache-bits 4: got heads of {size} channels, needs 8, 16, 24 or .*; use 16"):
        convert_command(str(teacher), tmp_path / "out", dry_run=True, cache_bits=4)


def test_a_model_whose_heads_cannot_be_packed_is_refused() -> None:
    models = (tiny_teacher("llama", head_dim=80), tiny_mixture("llama", tiny_table(mixer="window"), head_dim=80))
    for bits, model in product((4, 8), models):
        with pytest.raises(UserError, match=f"got heads of 80 channels, of which {bits} bits need a multiple of 32"):
            set_cache_bits(model, bits)
