"""Mixed heads against the teacher: a layer that is split and changes nothing computes what it computed before."""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf import LayerTable
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.cache.mixed_cache import ConstantMixedCacheLayer, MixedCacheLayer
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.restrict import restrict_heads, restrict_to_window
from support.float64 import Float64, assert_same_function, double
from support.read_in_parts import read_in_parts
from support.refusals import assert_refused
from support.tiny_models import (
    LAYERS,
    ONE_NORM,
    mixed_mixture_table,
    mixed_table,
    mixture_table,
    tiny_mixture,
    tiny_teacher,
)

FOUR = {"num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16}
SPLITTABLE = [family for family in FAMILIES if family not in ONE_NORM]
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))
PATTERNS = {0: [1], 1: [0, 1, 2, 3], 2: [], 3: [0, 3]}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def neutral(family: str, window: int = 64) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A teacher, and the same with heads split between softmax and a window that is longer than the test."""
    teacher = tiny_teacher(family, **FOUR)
    return teacher, restrict_heads(copy.deepcopy(teacher), PATTERNS, window, 0)


@pytest.mark.parametrize("family", SPLITTABLE)
@torch.no_grad()
def test_a_split_layer_is_the_teacher(family: str) -> None:
    teacher, model = neutral(family)
    kinds = [type(layer.self_attn).__name__ for layer in model.model.layers]
    assert kinds[0] == kinds[3] == "MixedHeads"
    assert kinds[2].startswith("Window")
    assert kinds[1] == type(teacher.model.layers[1].self_attn).__name__
    # A window takes the family's eager attention where scores are capped, which SDPA leaves out.
    teacher.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    assert model.generate(IDS, **GREEDY).tolist() == teacher.generate(IDS, **GREEDY).tolist()
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    padded = [m.generate(IDS, attention_mask=mask, **GREEDY).tolist() for m in (teacher, model)]
    assert padded[0] == padded[1]
    assert_same_function(teacher, model, IDS)


@pytest.mark.parametrize("family", sorted(ONE_NORM))
def test_one_norm_over_all_heads_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=f"model_type {family}: its q/k norms go over all heads"):
        restrict_heads(tiny_teacher(family, **{**FOUR, "hidden_size": 128}), {0: [0]})
    with pytest.raises(UserError, match=r"model_type deltanet_.*choose whole layers"):
        tiny_mixture(family, mixed_table("softmax", "window"))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
@torch.no_grad()
def test_kept_heads_see_everything_and_the_others_their_window(family: str) -> None:
    """By hand: attention of one layer, head by head, with the mask of its kind."""
    teacher = tiny_teacher(family, **FOUR, attn_implementation="eager")
    attention = teacher.model.layers[1].self_attn
    hidden = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))
    model = restrict_heads(copy.deepcopy(teacher), {1: [0, 3]}, 5, 2)
    mixed = model.model.layers[1].self_attn
    kwargs = {}

    def keep(module: Any, args: Any, given: dict[str, Any]) -> None:
        kwargs.update(given)

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    teacher(IDS)
    handle.remove()
    position = torch.arange(24)
    distance = position[:, None] - position
    mask = (distance >= 0) & ((distance < 5) | (position < 2))
    near = torch.zeros(24, 24).masked_fill(~mask, torch.finfo(torch.float32).min).expand(2, 1, 24, 24)
    far = torch.zeros(24, 24).masked_fill(distance < 0, torch.finfo(torch.float32).min).expand(2, 1, 24, 24)
    heads: list[torch.Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
    positions = {"position_embeddings": kwargs["position_embeddings"]}
    for bias in (far, near):
        attention(hidden_states=hidden, attention_mask=bias, **positions)
    handle.remove()
    chosen = [heads[0] if head // 2 in (0, 3) else heads[1] for head in range(8)]
    joined = torch.cat([part[..., 16 * head : 16 * head + 16] for head, part in enumerate(chosen)], dim=-1)
    wanted = attention.o_proj(joined)
    torch.testing.assert_close(
        mixed(hidden_states=hidden, attention_mask=far, **positions)[0], wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
@torch.no_grad()
def test_cache_bytes_are_those_of_each_kind(family: str) -> None:
    """Kept heads grow with the tokens (or to the family's window), windows and states do not grow."""
    model = tiny_mixture(family, mixed_table("softmax", "linear"))
    for length in (6, 24, 60):
        cache = DynamicCache(config=model.config)
        model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
        assert all(isinstance(layer, MixedCacheLayer) for layer in cache.layers)
        wanted = 0
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            sliding = cache.layers[index].is_sliding
            tokens = min(length, 7) if sliding else length
            wanted += attention.state_bytes(torch.float32)
            wanted += 2 * attention.growing_heads * attention.softmax.head_dim * tokens * 4
        assert cache_bytes(cache) == wanted
        assert cache.get_seq_length() == length


@torch.no_grad()
def test_without_a_growing_branch_the_cache_is_constant() -> None:
    model = tiny_mixture("llama", mixed_table("window", "linear"))
    sizes = set()
    for length in (3, 24, 60):
        cache = DynamicCache(config=model.config)
        model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
        assert all(isinstance(layer, ConstantMixedCacheLayer) for layer in cache.layers)
        sizes.add(cache_bytes(cache))
        assert cache.get_seq_length() == length
    assert sizes == {sum(layer.self_attn.state_bytes(torch.float32) for layer in model.model.layers)}


TABLES = {
    "softmax+linear": ("softmax", "linear"),
    "softmax+window": ("softmax", "window"),
    "window+linear": ("window", "linear"),
    "all linear": ("linear", "linear"),
    "all softmax": ("softmax", "softmax"),
}


@torch.no_grad()
@pytest.mark.parametrize("heads", TABLES.values(), ids=TABLES)
def test_static_cache_equals_dynamic(heads: tuple[str, str]) -> None:
    model = tiny_mixture("gemma2", mixed_table(*heads))
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    dynamic = model.generate(IDS, attention_mask=mask, **GREEDY)
    static = model.generate(IDS, attention_mask=mask, cache_implementation="static", disable_compile=True, **GREEDY)
    assert static.tolist() == dynamic.tolist()
    double(model)
    with Float64():  # A prompt after a reset is read in another form than the first, which rounds otherwise.
        cache = StaticCache(config=model.config, max_cache_len=40)
        first = model(IDS, past_key_values=cache, use_cache=True).logits
        cache.reset()
        assert int(cache.get_seq_length()) == 0
        torch.testing.assert_close(model(IDS, past_key_values=cache, use_cache=True).logits, first)


@torch.no_grad()
def test_batch_operations() -> None:
    model = tiny_mixture("llama", mixed_table("softmax", "linear"))
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    swapped = model(IDS[[1, 0], :1], past_key_values=cache, use_cache=True).logits
    plain = model(torch.cat([IDS, IDS[:, :1]], dim=1)).logits[[1, 0], -1:]
    torch.testing.assert_close(swapped, plain, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_cropping_changes_nothing_before_it_is_refused() -> None:
    model = tiny_mixture("llama", mixed_table("softmax", "linear"))
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, use_cache=True)
    cache.crop(0)
    with pytest.raises(ValueError, match="recurrent state holds no history"):
        cache.crop(-1)
    assert {layer.get_seq_length() for layer in cache.layers} == {24}
    torch.testing.assert_close(
        model(IDS[:, :1], past_key_values=cache, use_cache=True).logits,
        model(torch.cat([IDS, IDS[:, :1]], dim=1)).logits[:, -1:],
        rtol=2e-4,
        atol=2e-4,
    )


@torch.no_grad()
def test_only_growing_keys_are_offloaded() -> None:
    model = tiny_mixture("llama", mixed_table("softmax", "linear"))
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, use_cache=True)
    layer = cache.layers[0]
    moved: list[Any] = []
    layer.parts["softmax"].offload = lambda: moved.append("softmax")
    layer.parts["linear"].offload = lambda: moved.append("linear")
    layer.offload()
    assert moved == ["softmax"]


@pytest.mark.parametrize(("table", "growing"), [(mixture_table(), {1}), (mixed_mixture_table(), {0, 2, 3})])
@torch.no_grad()
def test_an_offloaded_cache_brings_back_growing_keys_only(table: LayerTable, growing: set[int]) -> None:
    model = tiny_mixture("llama", table)
    cache: Any = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, use_cache=True)
    cache.prefetch_stream, brought = nullcontext(), set()
    for index, layer in enumerate(cache.layers):
        layer.prefetch = functools.partial(brought.add, index)
    for index in range(LAYERS):
        cache.prefetch(index, only_non_sliding=False)
    assert brought == growing


@torch.no_grad()
def test_attention_implementation_reaches_the_branches() -> None:
    model = tiny_mixture("llama", mixed_table("softmax", "window"))
    model.set_attn_implementation("eager")
    branches = model.model.layers[0].self_attn.branches
    assert branches["softmax"].config._attn_implementation == "eager"
    assert branches["window"].config.whole._attn_implementation == "eager"  # it takes the window's own softmax
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("sdpa")
    assert copied.model.layers[0].self_attn.softmax.config._attn_implementation == "sdpa"
    assert branches["softmax"].config._attn_implementation == "eager"
    torch.testing.assert_close(copied(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    linear = tiny_mixture("llama", mixed_table("softmax", "linear"))
    assert torch.equal(pickle.loads(pickle.dumps(linear))(IDS).logits, linear(IDS).logits)


@torch.no_grad()
def test_a_window_on_a_model_with_mixed_heads_takes_its_softmax_heads() -> None:
    model = tiny_mixture("llama", mixed_table("softmax", "linear"))
    restrict_to_window(model, 5, 2)
    cache = DynamicCache(config=model.config)
    found = read_in_parts(model, IDS, [7, 1, 16], cache=cache)
    torch.testing.assert_close(found, model(IDS).logits, rtol=2e-4, atol=2e-4)
    assert all(isinstance(layer, ConstantMixedCacheLayer) for layer in cache.layers)
    assert cache_bytes(cache) == 2 * sum(layer.self_attn.state_bytes(torch.float32) for layer in model.model.layers)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, r"heads: got \(\), expected a list"),
    ({"heads": "softmax"}, r"heads: got 'softmax', expected a list"),
    ({"heads": ["softmax", "full"]}, r"heads\[1\]: got 'full', expected one of softmax, window, linear"),
    ({"heads": [["softmax"]]}, r"heads\[0\]: got \['softmax'\]"),
    ({"heads": ["window"], "window": 0}, "window: got 0"),
    ({"heads": ["linear"], "linear_mixer": "window"}, "linear_mixer: got 'window', expected one of gated_deltanet"),
    ({"heads": ["linear"], "linear_mixer": ["x"]}, "linear_mixer: got"),
    ({"heads": ["linear"], "linear": None}, "linear: got None, expected the settings of gated_deltanet"),
    ({"heads": ["linear"], "linear": {"rope": True}}, r"linear\.[a-z_]+: missing key"),
    ({"heads": ["linear"], "linear": 3}, "linear: got 3, expected the settings"),
]


def test_settings_that_make_no_sense_are_refused() -> None:
    rows = [(changes, ValueError, message) for changes, message in WRONG]
    assert_refused(functools.partial(LayerTable.preset, LAYERS, "mixed_heads"), rows)


def test_the_number_of_heads_is_the_models() -> None:
    with pytest.raises(ValueError, match="heads: lists 3 kinds, but layer 0 has 2 key/value heads"):
        tiny_mixture("llama", mixed_table("softmax", "linear", "window"))


def test_what_cannot_be_restricted_is_refused() -> None:
    with pytest.raises(UserError, match="window: got 0"):
        restrict_heads(tiny_teacher("llama"), {}, window=0)
    for kept in ({4: [0]}, {-1: [0]}, {0: [4]}, {0: [-1]}):
        with pytest.raises(UserError, match="model, which has layers 0 to 3 with key/value heads 0 to 3"):
            restrict_heads(tiny_teacher("llama", **FOUR), kept)
    with pytest.raises(UserError, match="give an unchanged teacher"):
        restrict_heads(tiny_mixture("llama", mixed_table("softmax", "linear")), {})
    with pytest.raises(UserError, match="offloaded"):
        restrict_heads(cpu_offload(tiny_teacher("llama"), torch.device("cpu")), {0: [0]})
    wrapped = get_peft_model(tiny_teacher("llama"), LoraConfig())
    for adapted in (wrapped, wrapped.get_base_model()):
        with pytest.raises(UserError, match=r"layer 0: its attention .* has adapters; .* or merge the adapters$"):
            restrict_heads(adapted, {0: [0]})


def test_new_parts_are_the_linear_branch() -> None:
    attention = tiny_mixture("llama", mixed_table("softmax", "linear")).model.layers[0].self_attn
    assert isinstance(attention, MixedHeads)
    assert attention.new_parts() == [attention.linear]
    assert mixed_table("softmax", "linear").only_kind.recurrent == LayerTable.preset(1).only_kind.settings
    assert tiny_mixture("llama", mixed_table("softmax", "window")).model.layers[0].self_attn.new_parts() == []
    assert mixed_table("softmax", "window").only_kind.recurrent is None


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_all_caches_give_the_same_tokens() -> None:
    """Growing, offloaded, and from CUDA graphs with a static cache."""
    model = tiny_mixture("gemma2", mixed_mixture_table()).to("cuda")
    ids, wanted = IDS.cuda(), model.generate(IDS.cuda(), **GREEDY).tolist()
    for implementation in ("static", "offloaded"):
        assert model.generate(ids, cache_implementation=implementation, **GREEDY).tolist() == wanted
