"""The kinds that stay quadratic: softmax attention at the start, and their calls and caches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.layer.parts import Opening
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind
from deltanet_hf.mixers.quadratic.decay_bias import split
from deltanet_hf.models.assisted import place_layers
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.families import FAMILIES
from support.float64 import Float64, float64_logits
from support.read_in_parts import read_in_parts
from support.tiny_models import tiny_student, tiny_teacher
from support.transformers_version import several_recorded_calls

KINDS = [name for name, kind in MIXERS.items() if issubclass(kind, AttentionKind)]
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))


def layers(model: PreTrainedModel) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def neutral(model_type: str, kind: str, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A teacher and a student that begins as the converter makes it."""
    teacher = tiny_teacher(model_type)
    teacher.set_attn_implementation("eager")  # SDPA has no cap for scores
    student = tiny_student(model_type, mixer=kind, **changes)
    assert not student.load_state_dict(teacher.state_dict(), strict=False).unexpected_keys
    with torch.no_grad():
        for layer in layers(student):
            layer.start_neutral(0.02)
    return teacher, student


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *((family, "fox") for family in FAMILIES),
        *((family, kind) for family in ("llama", "gemma2") for kind in ("alibi", "deltaformer")),
    ],
)
def test_at_the_start_it_is_the_teachers_attention(model_type: str, kind: str) -> None:
    teacher, student = neutral(model_type, kind)
    torch.testing.assert_close(float64_logits(student, IDS), float64_logits(teacher, IDS), rtol=0, atol=5e-13)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_at_the_start_relaxed_path_is_close_to_it(model_type: str) -> None:
    """The strength 9e-5 bounds the relative difference; without it there is none."""
    teacher, student = neutral(model_type, "path")
    wanted, found = float64_logits(teacher, IDS), float64_logits(student, IDS)
    assert 0 < (found - wanted).norm() / wanted.norm() < 3e-3
    for layer in layers(student):
        layer.turns.b_proj.bias.fill_(-800.0)
    torch.testing.assert_close(float64_logits(student, IDS), wanted, rtol=0, atol=5e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_start_the_new_parts_have_a_gradient(kind: str) -> None:
    _, student = neutral("llama", kind)
    student(IDS, labels=IDS).loss.backward()
    for layer in layers(student):
        (part,) = layer.new_parts()
        found = [parameter.grad.abs().max() for parameter in part.parameters() if parameter.grad is not None]
        assert max(found) > 0
        assert not isinstance(part, Opening) or bool((part.opening.grad != 0).all())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_familys_own_window_stays(kind: str) -> None:
    """Through a sliding cache, in chunks, and with capped scores."""
    model = tiny_student("gemma2", mixer=kind).double()
    with Float64():
        wanted = model(IDS).logits
        found = read_in_parts(model, IDS, [9, 1, 14])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_called_alone_masks_packed_rows_and_the_window(kind: str) -> None:
    """As alignment calls it, over two rows at once."""
    model = tiny_student("mistral", mixer=kind)
    layer = layers(model)[1]
    seen: list[dict[str, Any]] = []
    handle = layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    positions = torch.cat([torch.arange(11), torch.arange(13), torch.arange(24)]).view(2, 24)
    model(IDS, position_ids=positions, use_cache=False)
    model(IDS, use_cache=False)
    handle.remove()
    for kwargs, boundaries in zip(seen, (torch.tensor([0, 11, 24, 48, 48]), None), strict=True):
        assert (kwargs.get("cu_seq_lens_q") is None) == (boundaries is None)
        alone = {name: kwargs[name] for name in ("hidden_states", "position_embeddings")}
        wanted, _ = layer(**kwargs)
        found, _ = layer(**alone, cu_seq_lens_q=boundaries)
        torch.testing.assert_close(found, wanted)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_padded_on_the_right_goes_on_as_the_row_alone(kind: str) -> None:
    model = tiny_student("llama", mixer=kind)
    ids = torch.cat([IDS[:1, :14], torch.zeros(1, 6, dtype=torch.long)], dim=1)
    mask = (torch.arange(20) < 14).long()[None]
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    model(IDS[:1, :14], past_key_values=alone, use_cache=True)
    for step in range(14, 18):
        mask = torch.cat([mask, torch.ones(1, 1).long()], dim=1)
        token, at = IDS[:1, step : step + 1], torch.tensor([[step]])
        found = model(token, attention_mask=mask, position_ids=at, past_key_values=cache, use_cache=True).logits
        wanted = model(token, past_key_values=alone, use_cache=True).logits
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_through_a_cache(kind: str) -> None:
    """Also where a decay is 1, so that several tokens of the cache have the same sum of decays."""
    model = tiny_student("llama", mixer=kind).double()
    names, weights = zip(*model.named_parameters(), strict=True)
    with Float64():
        wanted = torch.autograd.grad(model(IDS, use_cache=False).logits[:, 10:].square().mean(), weights)
        logits = read_in_parts(model, IDS, [10, 1, 13])
        found = torch.autograd.grad(logits[:, 10:].square().mean(), weights)
    for name, one, other in zip(names, found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@several_recorded_calls
def test_several_calls_are_recorded_beside_a_sliding_window() -> None:
    """The sliding layers keep more tokens then than a query sees."""
    model = tiny_student("mistral", mixer="deltaformer")
    cache = DynamicCache(config=model.config)
    place_layers(model, cache)
    cache.activate_past_recording()
    found = read_in_parts(model, IDS, [10, 1, 2, 11], cache=cache)
    torch.testing.assert_close(found, model(IDS).logits, rtol=2e-4, atol=2e-4)
    cache.crop(-13)
    again = model(IDS[:, 11:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, model(IDS).logits[:, 11:], rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fox", "alibi", "path"])
def test_a_static_cache_decodes_alike(kind: str) -> None:
    model = tiny_student("llama", mixer=kind)
    cache = StaticCache(config=model.config, max_cache_len=32)
    wanted = model(IDS, use_cache=False).logits
    for _ in range(2):  # the second time after a reset
        found = read_in_parts(model, IDS, [20, 1, 1, 1, 1], cache=cache)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
        cache.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sum_of_decays_has_all_its_bits_in_16_bit_channels(compiled: bool, dtype: torch.dtype) -> None:
    """torch.compile removes roundings that are undone at once; the parts must not depend on them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = torch.rand(2, 3, 40, 2, generator=torch.Generator().manual_seed(0))
    x = (3 * steps).cumsum(2).to(device).requires_grad_()
    parts = (torch.compile(split) if compiled else split)(x, dtype)
    assert parts.dtype == dtype
    assert torch.equal(parts.float().unflatten(-1, (3, 2)).sum(-2), x)
    (gradient,) = torch.autograd.grad(parts.float().unflatten(-1, (3, 2))[..., 0, :].sum(), x)
    assert (gradient == 1).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fox", "alibi", "deltaformer"])
def test_tokens_can_be_taken_back(kind: str) -> None:
    model = tiny_student("llama", mixer=kind)
    cache = DynamicCache(config=model.config)
    model(IDS[:, :15], past_key_values=cache, use_cache=True)
    cache.crop(-5)
    found = model(IDS[:, 10:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(IDS).logits[:, 10:], atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_caches_and_kernels_that_cannot_be_served_are_refused() -> None:
    model = tiny_student("llama", mixer="path")
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="cannot take back 5 tokens"):
        cache.crop(-5)
    for kind in ("fox", "alibi", "deltaformer"):
        model = tiny_student("llama", mixer=kind)
        with pytest.raises(UserError, match=f"cache bits: {kind} layers keep every token in 16 bits"):
            set_cache_bits(model, 8)
    with pytest.raises(ValueError, match="a static cache does not tell"):
        model(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=32), use_cache=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q: packed sequences leave no state"):
        layers(model)[0](torch.randn(1, 3, 32), past_key_values=DynamicCache(), cu_seq_lens_q=torch.tensor([0, 1, 3]))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation: got 'flash_attention_2'"):
        layers(model)[0](torch.randn(1, 3, 32))


# Around the layer.


def test_attention_that_was_compiled_is_refused() -> None:
    attention = tiny_teacher("llama").model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward)  # as torch.compile and offloading leave it
    with pytest.raises(UserError, match=r"layer 1: its attention is offloaded or compiled"):
        MIXERS["fox"].from_attention(attention, attention.config, 1, None)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_it_reads_and_decodes_as_in_float64(kind: str, dtype: torch.dtype) -> None:
    """Complete rows, chunks, and a static cache where there may be one."""
    with Float64():
        wanted = tiny_student("llama", mixer=kind).double()(IDS).logits.cuda()
    model, ids = tiny_student("llama", mixer=kind).to("cuda", dtype), IDS.cuda()
    for module in model.modules():
        if isinstance(module, Opening):
            module.float()
    rounding = float((model(ids, use_cache=False).logits.double() - wanted).norm() / wanted.norm())
    assert rounding < {torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    caches: list[Cache] = [DynamicCache(config=model.config)]
    if kind != "deltaformer":
        caches.append(StaticCache(config=model.config, max_cache_len=32))
    for cache in caches:
        found = read_in_parts(model, ids, [10, 1, 12, 1], cache=cache)
        assert (found.double() - wanted).norm() / wanted.norm() < 2 * rounding + 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_decodes_as_it_reads(kind: str) -> None:
    """The recurrence of the cache loses no more than one rounding of bfloat16 more than the full row."""
    model = tiny_student("llama", mixer=kind)
    exact = model(IDS).logits
    model = model.bfloat16()
    for module in model.modules():
        if isinstance(module, Opening):
            module.float()
    full = model(IDS).logits.float()
    found = read_in_parts(model, IDS, [10, 1, 1, 12])
    rounding = float((full - exact).norm() / exact.norm())
    assert rounding < 0.03  # four layers, each some roundings of 2^-8
    assert (found.float() - exact).norm() / exact.norm() < 2 * rounding
