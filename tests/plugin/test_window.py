"""Window + sinks against attention computed by hand, with a cache of constant size, as a baseline and as a layer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import IA3Config, LNTuningConfig, LoHaConfig, LoraConfig, OFTConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits
from deltanet_hf.models.restrict import restrict_heads, restrict_to_window
from support.read_in_parts import read_in_parts
from support.tiny_models import HYBRID, mixed_table, tiny_mixture, tiny_qwen3_5, tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))


def windowed(model_type: str, window: int = 5, sinks: int = 2) -> PreTrainedModel:
    return restrict_to_window(tiny_teacher(model_type), window, sinks)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_a_familys_own_window_hides_the_sinks(model_type: str) -> None:
    """Its window of 8, which half of the layers have."""
    position = torch.arange(IDS.shape[1])
    distance = position[:, None] - position
    mask = (distance >= 0) & ((distance < 5) | (position < 2))
    plain = tiny_teacher(model_type)
    plain.set_attn_implementation("eager")
    masks = {"full_attention": mask, "sliding_attention": mask & (distance < 8)}
    float_masks = {
        key: torch.zeros(2, 1, 24, 24).masked_fill(~value, torch.finfo(torch.float32).min)
        for key, value in masks.items()
    }
    wanted = plain(IDS, attention_mask=float_masks).logits
    torch.testing.assert_close(windowed(model_type)(IDS).logits, wanted, atol=2e-5, rtol=1e-4)


def reference_mask(numbers: torch.Tensor, window: int = 5, sinks: int = 2) -> torch.Tensor:
    """[T, T] bool for tokens with these numbers (1, 2, ...; 0 for padding) in their sequence."""
    distance = numbers[:, None] - numbers
    seen = (distance >= 0) & ((distance < window) | (numbers <= sinks)) & (numbers > 0)
    return seen | torch.eye(len(numbers), dtype=torch.bool)


@torch.no_grad()
@pytest.mark.parametrize(
    ("window", "sinks", "parts"),
    [
        (window, (0, 1, 4)[(number + shift) % 3], parts)
        for number, window in enumerate((1, 3, 5, 30))
        for shift, parts in enumerate(([1] * 24, [7, 1, 1, 9, 6], [3, 21]))
    ],
    ids=str,
)
def test_the_cache_gives_what_the_mask_gives(window: int, sinks: int, parts: list[int]) -> None:
    """However the sequence is cut, and with a cache whose bytes do not depend on its length."""
    model = windowed("llama", window, sinks)
    wanted = model(IDS, use_cache=False).logits
    mask = reference_mask(torch.arange(1, 25), window, sinks)
    by_mask = tiny_teacher("llama")(IDS, attention_mask=mask.expand(2, 1, 24, 24)).logits
    torch.testing.assert_close(wanted, by_mask, atol=1e-5, rtol=1e-4)
    cache, sizes = DynamicCache(config=model.config), set()
    found = []
    for part in IDS.split(parts, dim=1):
        found.append(model(part, past_key_values=cache, use_cache=True).logits)
        sizes.add(cache_bytes(cache))
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=1e-5, rtol=1e-4)
    per_row = sum(layer.self_attn.state_bytes(torch.float32) for layer in model.model.layers)
    assert sizes == {2 * per_row}
    assert cache.get_seq_length() == 24


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_distances_are_counted_in_real_tokens(side: str) -> None:
    """A padded row gives what the row alone gives, in the prompt and in tokens after it."""
    model = windowed("llama", 4, 2)
    row, padding = IDS[:1, :14], torch.zeros(1, 6, dtype=torch.long)
    mask = torch.cat([torch.zeros(1, 6), torch.ones(1, 14)], dim=1).long()
    ids = torch.cat([padding, row], dim=1)
    if side == "right":
        mask, ids = mask.flip(-1), torch.cat([row, padding], dim=1)
    batch, masks = torch.cat([ids, IDS[1:, :20]]), torch.cat([mask, torch.ones(1, 20).long()])
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    positions = (masks.cumsum(-1) - 1).clamp(min=0)
    found = model(batch, attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True).logits
    wanted = model(row, past_key_values=alone, use_cache=True).logits
    torch.testing.assert_close(found[:1][mask.bool()], wanted[0], atol=1e-5, rtol=1e-4)
    for step in range(14, 18):
        masks = torch.cat([masks, torch.ones(2, 1).long()], dim=1)
        positions = masks.cumsum(-1)[:, -1:] - 1
        token = IDS[:1, step : step + 1]
        found = model(
            token.expand(2, -1), attention_mask=masks, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
        wanted = model(token, past_key_values=alone, use_cache=True).logits
        torch.testing.assert_close(found[:1], wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_flash_attention_is_refused() -> None:
    model = windowed("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation: got 'flash_attention_2'"):
        model.model.layers[0].self_attn(torch.randn(1, 3, 32))


@torch.no_grad()
def test_an_offloaded_model_can_be_restricted() -> None:
    model = cpu_offload(tiny_teacher("llama"), torch.device("cpu"))
    assert torch.equal(restrict_to_window(model, 5, 2)(IDS).logits, windowed("llama")(IDS).logits)


@torch.no_grad()
def test_a_model_in_a_wrapper_can_be_restricted(tmp_path: Path) -> None:
    model = get_peft_model(tiny_teacher("llama"), LoraConfig(r=2, init_lora_weights=False)).eval()
    merged = copy.deepcopy(model).merge_and_unload()
    assert restrict_to_window(model, 5, 2) is model
    torch.testing.assert_close(model(IDS).logits, restrict_to_window(merged, 5, 2)(IDS).logits, atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match=r"^save_pretrained: "):
        model.merge_and_unload().save_pretrained(tmp_path)


def test_attention_that_was_compiled_is_refused() -> None:
    model = tiny_teacher("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = torch.compile(attention.forward)
    with pytest.raises(UserError, match=r"layer 1: its attention is offloaded or compiled"):
        restrict_to_window(model)


@torch.no_grad()
def test_a_second_window_replaces_the_first() -> None:
    model = restrict_to_window(windowed("llama", 3, 1), 5, 2)
    torch.testing.assert_close(model(IDS).logits, windowed("llama")(IDS).logits)
    assert len(model.model._forward_pre_hooks) == 3  # the check, packing, padding: once each


@pytest.mark.parametrize(
    ("make", "restrict"),
    [
        (lambda: tiny_student("llama", layers=HYBRID, mixer="gated_deltanet+window", window=33), restrict_to_window),
        (lambda: tiny_mixture("llama", mixed_table("linear", "softmax")), restrict_to_window),
        (lambda: tiny_teacher("llama"), lambda model, *sizes: restrict_heads(model, {0: [1], 2: [0, 1]}, *sizes)),
    ],
    ids=["layers", "heads of students", "heads"],
)
@torch.no_grad()
def test_a_model_keeps_the_bits_of_its_cache(make: Any, restrict: Any) -> None:
    found, wanted = restrict(set_cache_bits(make(), 4), 40, 4), set_cache_bits(restrict(make(), 40, 4), 4)
    ids = IDS.repeat(1, 3)
    assert cache_bits_of(found) == 4
    assert torch.equal(found(ids).logits, wanted(ids).logits)
    assert not torch.equal(found(ids).logits, restrict(make(), 40, 4)(ids).logits)


@torch.no_grad()
def test_a_saved_window_is_a_window(tmp_path: Path) -> None:
    """Trained or not, the restriction is part of the model, unlike that of the baseline."""
    model = tiny_student("llama", mixer="window", window=5, sinks=2)
    model.load_state_dict(tiny_teacher("llama").state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(IDS).logits, windowed("llama")(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_adapters_without_targets_reach_windows(family: str) -> None:
    """Also where the family's attention has one projection for q, k and v, and no layer has others."""
    model = get_peft_model(tiny_student(family, mixer="window", window=5, sinks=2), LoraConfig(task_type="CAUSAL_LM"))
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == ({"qkv_proj"} if family == "phi3" else {"q_proj", "v_proj"})


METHODS = {
    LoraConfig: {"q_proj", "v_proj"},
    LoHaConfig: {"q_proj", "v_proj"},
    OFTConfig: {"q_proj", "v_proj"},
    IA3Config: {"k_proj", "v_proj", "down_proj"},
    LNTuningConfig: {"input_layernorm", "post_attention_layernorm", "norm"},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_peft_has_the_targets_of_the_teacher(method: Any) -> None:
    def adapted(model: Any) -> set[str]:
        model = get_peft_model(model, method(task_type="CAUSAL_LM"))
        layers = (name for name, part in model.named_modules() if isinstance(part, BaseTunerLayer))
        return {name.rpartition(".")[2] for name in layers}

    assert adapted(tiny_student("llama", layers=HYBRID)) == adapted(tiny_teacher("llama")) == METHODS[method]
    assert adapted(tiny_student("phi3", layers=HYBRID)) >= METHODS[method]
    assert adapted(tiny_qwen3_5()) >= METHODS[method] - {"k_proj", "q_proj", "v_proj"}


@torch.no_grad()
def test_hybrid_keeps_its_linear_layers() -> None:
    """Through a linear layer the last token still depends on tokens outside of the window."""
    model = restrict_to_window(tiny_student("llama", layers=(0, 2)), 5, 2)
    changed = IDS.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    assert not torch.equal(model(IDS).logits[0, -1], model(changed).logits[0, -1])


def test_impossible_window_is_refused() -> None:
    with pytest.raises(UserError, match="window must be >= 1"):
        windowed("llama", window=0)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_the_cache_gives_what_the_mask_gives(dtype: torch.dtype) -> None:
    """Read in chunks, decoded, and decoded from CUDA graphs with a static cache."""
    model = windowed("llama").to("cuda", dtype)
    ids = IDS.cuda()
    wanted = windowed("llama").double()(IDS).logits.cuda()
    rounding = float((model(ids, use_cache=False).logits.double() - wanted).norm())
    found = read_in_parts(model, ids, [7, 1, 1, 9, 6])
    assert float((found.double() - wanted).norm()) <= 2 * rounding
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    eager = model.generate(ids, **options)
    assert model.generate(ids, cache_implementation="static", **options).tolist() == eager.tolist()
