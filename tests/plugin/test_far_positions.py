"""Models that read further than their teacher against the definition of their positions, in every form of cache."""

from __future__ import annotations

import math
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

from deltanet_hf import LayerTable, converted_config, restrict_to_window
from deltanet_hf.decoding import captured_step, decoded_by
from deltanet_hf.decoding.captured_graphs import read_prompt
from deltanet_hf.errors import UserError
from deltanet_hf.fast import FastDecoder, fast_form
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache, fake_quantised
from deltanet_hf.mixers.layer import Mixer
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.models.assisted import place_layers
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.far_positions import FarPositions, yarn_config
from deltanet_hf.sessions.model_identity import model_identity
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, rounded_tokens
from support.float64 import Float64
from support.plain_form import plain_form
from support.refusals import assert_refused
from support.replayed_step import EmulatedCapture
from support.tiny_models import mixed_heads, mixed_table, randomise, teacher_config
from tests.plugin.test_delayed_state import by_definition as delayed_by_definition

TEACHER, CONTEXT, THETA = 32, 128, 1e4
IDS = torch.randint(3, 97, (2, 100), generator=torch.Generator().manual_seed(0))
FORMS = [
    *(("yarn", bits, False) for bits in (16, 8, 4)),
    *(("yarn", bits, True) for bits in (16, 4)),
    ("nope", 16, False),
    ("nope", 4, False),
    ("cut", 16, False),
    ("cut", 16, True),
]
IN_BETWEEN = [("yarn", 16, False), ("yarn", 8, False)]  # between 4 bits and states
BOUND = {False: 40 + 3, True: 64 + 4}
"""The furthest position of sinks: half the teacher's positions would not hold the longest window; by `states`."""


def table(positions: FarPositions | None = None, states: bool = False) -> LayerTable:
    """A layer that is whole, two with whole heads and windows, and one with windows alone; with `states`, windows that
    have states of what has left them."""
    if states:
        own = LayerTable.preset(1, "gated_deltanet+window", window=33, state_dtype="float32").only_kind
        far, near = (mixed_heads(head, "linear", linear=own.settings.to_dict()) for head in ("softmax", "window"))
        kinds = {"state": own, "far": far, "near": near}
        return LayerTable(kinds, ("softmax", "far", "near", "state"), positions=positions)
    mixed = mixed_table("softmax", "window", sinks=3).with_windows((5, 40, 7, 9))
    local = LayerTable.preset(1, "window", window=9, sinks=3).only_kind
    kinds, (_, second, third, _) = {**mixed.kinds, "local": local}, mixed.layers
    return LayerTable(kinds, ("softmax", second, third, "local"), positions=positions)


def made(layers: LayerTable, bits: int = 16, family: str = "llama") -> PreTrainedModel:
    config = converted_config(teacher_config(family, max_position_embeddings=TEACHER), layers)
    model = model_class(family)(config).eval()
    randomise(model, 0)
    return set_cache_bits(model, bits)


def far(kind: Any, bits: int = 16, states: bool = False) -> PreTrainedModel:
    return made(table(FarPositions(kind, TEACHER, CONTEXT), states), bits)


def frequencies(size: int, yarn: bool) -> Tensor:
    """The angles per position of a head's pairs of channels [D / 2]; with the ramp of YaRN (arXiv 2309.00071)."""
    pairs = torch.arange(size // 2, dtype=torch.float64)
    own = THETA ** (-2 * pairs / size)
    if not yarn:
        return own
    low, high = (size * math.log(TEACHER / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return own * (1 - ramp) + own / (CONTEXT / TEACHER) * ramp


def rotated(x: Tensor, positions: Tensor, by: Tensor) -> Tensor:
    """x [B, T, H, D] at positions [T]."""
    angles = (positions[:, None] * by)[:, None]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def defined(model: Any, branch: Any, x: Tensor, kind: str, bits: int, bound: int) -> Tensor:
    """The output of a branch for x [B, T, hidden], of a whole or a window one pair of tokens by pair of tokens."""
    if isinstance(branch, Mixer):
        return delayed_by_definition(model, branch, x, bound)
    size, token = branch.head_dim, torch.arange(x.shape[1])
    q, k, v = (getattr(branch, f"{name}_proj")(x).unflatten(-1, (-1, size)) for name in "qkv")
    plain, is_window = k, isinstance(branch, WindowAttention)
    by = frequencies(size, kind == "yarn" and not is_window)
    cut = 0 if is_window or kind != "cut" else TEACHER
    if is_window or kind != "nope":
        scale = 1 if is_window or cut else 0.1 * math.log(CONTEXT / TEACHER) + 1
        near, k = rotated(q, token, by) * scale, rotated(k, token, by) * scale
    else:
        near = q * ((token + TEACHER).double().log() / math.log(TEACHER))[:, None, None]
    plain, k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (plain, k, v))
    own = packed = (k, v)
    if bits < 16:
        own = rounded_tokens(k), rounded_tokens(v)
        full = len(token) // GROUP * GROUP
        keys = own[0][:, :full].unflatten(1, (-1, GROUP)).transpose(2, -1)
        values = own[1][:, :full].unflatten(-1, (-1, min(GROUP, size)))
        in_groups = fake_quantised(keys, bits).transpose(2, -1).flatten(1, 2), fake_quantised(values, bits).flatten(-2)
        packed = tuple(torch.cat([x, y[:, full:]], dim=1) for x, y in zip(in_groups, own, strict=True))  # type: ignore[assignment]
    distance, is_sink = token[:, None] - token, token < (branch.settings.sinks if is_window else 0)
    is_own = (token[:, None] // GROUP == token // GROUP) | (token < SINKS)

    def products(q: Tensor) -> Tensor:
        whole, rounded = (torch.einsum("bthd,bshd->bhts", q, keys) for keys in (own[0], packed[0]))
        return torch.where(is_own, whole, rounded)

    scores, seen = products(near), distance >= 0
    if cut:
        far = torch.einsum("bthd,bshd->bhts", rotated(q, 0 * token + cut - 1, by), plain)
        scores = torch.where(distance < cut, scores, far)
    if is_window:
        window = branch.settings.window
        scores = torch.where((distance >= window) & is_sink, products(rotated(q, token.clamp_max(bound), by)), scores)
        seen = seen & ((distance < window) | is_sink)
    weights = (scores * branch.scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    output = torch.einsum("bhts,bshd->bthd", weights * is_own, own[1])
    return branch.o_proj((output + torch.einsum("bhts,bshd->bthd", weights * ~is_own, packed[1])).flatten(2))  # type: ignore[no-any-return]


def by_definition(model: Any, kind: str, bits: int, bound: int) -> Tensor:
    """Logits of IDS."""
    with pytest.MonkeyPatch.context() as patch, plain_form():
        for layer in model.model.layers:

            def attention(*, hidden_states: Tensor, own: Any = layer.self_attn, **kwargs: Any) -> tuple[Tensor, None]:
                parts = branches_of(own).values()
                return sum(defined(model, part, hidden_states, kind, bits, bound) for part in parts), None  # type: ignore[return-value]

            patch.setitem(vars(layer.self_attn), "forward", attention)
        logits: Tensor = model(IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    ("kind", "bits", "states"),
    [pytest.param(*form, marks=pytest.mark.slow) if form in IN_BETWEEN else form for form in FORMS],
)
@torch.no_grad()
def test_every_form_of_cache_computes_the_definition(kind: str, bits: int, states: bool) -> None:
    with Float64():
        model = far(kind, bits, states).double()
        wanted = by_definition(model, kind, bits, BOUND[states])
        assert isinstance(fast_form(model), FastDecoder)

        def differs(logits: Tensor) -> float:
            return float((logits - wanted).abs().max() / wanted.abs().max())

        def in_parts(*parts: int, cache: Any = None) -> Tensor:
            cache = cache or DynamicCache(config=model.config)
            read = [model(ids, use_cache=True, **{CACHE: cache}).logits for ids in IDS.split(parts, dim=1)]
            return torch.cat(read, dim=1)

        found = [model(IDS, use_cache=False).logits, in_parts(60, *[1] * 40), in_parts(12, 1, 1, 1, 1, 40, 1, 43)]
        found.append(in_parts(75, *[1] * 25))  # beyond the bound at once
        with plain_form():
            found += [model(IDS, use_cache=False).logits, in_parts(60, *[1] * 40), in_parts(7, 45, 1, 47)]
        if bits == 16:
            found.append(in_parts(50, *[1] * 50, cache=StaticCache(model.config, max_cache_len=CONTEXT)))
        assert max(map(differs, found)) < 1e-6


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(("kind", "bits"), [("yarn", 16), ("yarn", 4), ("cut", 16)])
def test_padded_and_packed_rows_are_those_alone(kind: str, bits: int, states: bool) -> None:
    with Float64(), torch.no_grad():
        model = far(kind, bits, states).double()
        wanted = [model(IDS[:1], use_cache=False).logits[0], model(IDS[1:, :71], use_cache=False).logits[0]]
        ids, mask = IDS.clone(), torch.ones_like(IDS)
        mask[1, :20] = mask[1, 51:60] = 0  # before the row and within it
        ids[mask == 1] = torch.cat([IDS[0], IDS[1, :71]])
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=model.config)
        found = torch.cat(
            [
                model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], **{CACHE: cache}).logits
                for a, b in ((0, 40), (40, 98), (98, 99), (99, 100))
            ],
            dim=1,
        )
        whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for logits in (found, whole):
            assert (logits[mask == 1] - torch.cat(wanted)).abs().max() < 1e-9
        if bits == 16:
            row = torch.cat([IDS[:1], IDS[1:, :71]], dim=1)
            places = torch.cat([torch.arange(100), torch.arange(71)])[None]
            boundaries = torch.tensor([0, 100, 171], dtype=torch.int32)
            packing = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
            packed = model(row, position_ids=places, use_cache=False, **packing).logits[0]
            assert (packed - torch.cat(wanted)).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("kind", "bits", "states"), [("yarn", 4, False), ("yarn", 4, True), ("nope", 16, False), ("cut", 16, True)]
)
@torch.no_grad()
def test_tokens_are_taken_back_beyond_the_bound(kind: str, bits: int, states: bool) -> None:
    with Float64():
        model = far(kind, bits, states).double()
        cache = DynamicCache(config=model.config)
        place_layers(model, cache)
        cache.activate_past_recording()
        for ids in (IDS[:, :75], IDS[:, 60:66]):
            model(ids, use_cache=True, **{CACHE: cache})
        cache.crop(-6)
        found = model(IDS[:, 75:83], use_cache=True, **{CACHE: cache}).logits
        assert (found - model(IDS[:, :83], use_cache=False).logits[:, 75:]).abs().max() < 1e-9


@torch.no_grad()
def test_windows_see_a_text_within_the_bound_as_without_the_setting() -> None:
    windows = LayerTable.preset(4, "window", window=5, sinks=2)
    short = IDS[:, : TEACHER // 2]
    for bits in (16, 4):
        own, further = made(windows, bits), made(replace(windows, positions=FarPositions("yarn", TEACHER, 64)), bits)
        assert torch.equal(own(short).logits, further(short).logits)
        assert not torch.equal(own(IDS).logits, further(IDS).logits)


@pytest.mark.parametrize("kind", ["yarn", "nope", "cut"])
@torch.no_grad()
def test_whole_heads_under_a_window_are_windows(kind: Any) -> None:
    """Without its positions, and with sinks at the same bounded one."""
    positions = FarPositions(kind, TEACHER, CONTEXT)
    windows = made(replace(LayerTable.preset(4, "window", window=9, sinks=3), positions=positions))
    restricted = restrict_to_window(made(LayerTable({}, ("softmax",) * 4, positions=positions)), 9, 3)
    cache = DynamicCache(config=restricted.config)
    found = [restricted(ids, use_cache=True, **{CACHE: cache}).logits for ids in IDS.split([60, 1, 39], dim=1)]
    wanted = windows(IDS).logits
    torch.testing.assert_close(restricted(IDS, use_cache=False).logits, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("states", [False, True])
@torch.no_grad()
def test_cut_distances_change_nothing_within_the_teachers_positions(capture: EmulatedCapture, states: bool) -> None:
    own, cut = made(table(states=states)), far("cut", states=states)
    short, long = IDS[:, :TEACHER], IDS[:, : TEACHER + 1]
    torch.testing.assert_close(cut(short).logits, own(short).logits, rtol=1e-5, atol=1e-5)
    assert (cut(long).logits - own(long).logits)[:, -1].abs().max() > 1e-4
    options: Any = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_length": TEACHER}
    assert torch.equal(cut.generate(IDS[:, :9], **options), own.generate(IDS[:, :9], **options))
    assert decoded_by(cut) == "separate launches: model.rotary_emb: its rotary embedding depends on the length"


@pytest.mark.parametrize(
    ("kind", "bits", "states"), [("yarn", 16, False), ("yarn", 4, False), ("nope", 4, False), ("yarn", 4, True)]
)
def test_a_captured_step_passes_the_bound(kind: str, bits: int, states: bool, capture: EmulatedCapture) -> None:
    """Captured at position 9, replayed to 60, or to 101: sinks are bounded from 43 on, or from 68."""
    model = far(kind, bits, states)
    options: Any = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 92 if states else 52}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(IDS[:, :9], **options)
    wanted = model.generate(IDS[:, :9], **options, disable_compile=True)
    assert capture.replayed > 40
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_step_that_is_captured_for_short_texts_turns_nothing(
    capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 17 tokens at first, and then for 43: sinks are as far away as they are."""
    monkeypatch.setattr("deltanet_hf.decoding.captured_graphs.LENGTHS", (16,))
    monkeypatch.setattr(captured_step, "SPARE", 8)
    monkeypatch.setattr(captured_step, "ALIGNMENT", 1)

    def plain(*args: Any, turn: object, **kwargs: Any) -> QuantisedKVCache:
        assert turn is None
        return QuantisedKVCache(*args, **kwargs)

    monkeypatch.setattr("deltanet_hf.fast.packed.QuantisedKVCache", plain)
    far("yarn", 4).generate(IDS[:, :9], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert capture.replayed > 10


@pytest.mark.parametrize("states", [False, True])
@torch.inference_mode()
def test_a_captured_prompt_passes_the_bound(
    states: bool, capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltanet_hf.decoding.captured_graphs.LENGTHS", (64, 96))
    with Float64():
        model = far("yarn", 4, states).double()
        for length in (96, 75):
            read = [
                {"input_ids": IDS[:, :length], CACHE: DynamicCache(config=model.config), "logits_to_keep": 1}
                for _ in range(2)
            ]
            found, wanted = read_prompt(model, {**read[0], "use_cache": True}), model(**read[1], use_cache=True)
            torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
            after = [model(IDS[:, length : length + 3], **{CACHE: one[CACHE]}).logits for one in read]
            torch.testing.assert_close(*after, rtol=1e-3, atol=1e-3)
    assert capture.captured_prefills == 1


@pytest.mark.parametrize("states", [False, True])
@torch.no_grad()
def test_it_is_saved_and_loaded_and_known_to_sessions(tmp_path: Path, states: bool) -> None:
    model = far("yarn", 4, states)
    assert model.config.max_position_embeddings == CONTEXT
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS).logits, model(IDS).logits)
    assert model_identity(model) == model_identity(loaded)
    assert model_identity(model)["config"] != model_identity(far("nope", 4, states))["config"]


@pytest.mark.parametrize(("kind", "bits", "states"), [("yarn", 16, False), ("cut", 16, False), ("yarn", 4, True)])
def test_gradients_reach_whole_heads_and_windows(kind: str, bits: int, states: bool) -> None:
    model = far(kind, bits, states).train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(bool(weight.grad.abs().sum() > 0) for name, weight in model.named_parameters() if "q_proj.w" in name)


def test_yarn_of_a_family_whose_config_names_no_head_size() -> None:
    own = teacher_config("mixtral", sliding_window=None, max_position_embeddings=TEACHER)
    assert own.head_dim is None
    named = teacher_config("mixtral", sliding_window=None, max_position_embeddings=TEACHER, head_dim=8)
    angles = [MixtralRotaryEmbedding(yarn_config(config, TEACHER, CONTEXT)).inv_freq for config in (own, named)]
    assert torch.equal(*angles)


def test_yarn_takes_what_default_positions_take() -> None:
    rope = {"rope_type": "default", "rope_theta": THETA}
    plain, more = (
        yarn_config(teacher_config("llama", rope_parameters={**rope, **stray}), TEACHER, CONTEXT)
        for stray in ({}, {"attention_factor": 2.0, "beta_fast": 4.0, "truncate": False})
    )
    assert more.rope_parameters == plain.rope_parameters
    positions = FarPositions("yarn", TEACHER, CONTEXT)
    config = converted_config(
        teacher_config("llama", rope_parameters={**rope, "partial_rotary_factor": 0.5}), table(positions)
    )
    with pytest.raises(UserError, match="ignores the config's partial_rotary_factor"):
        model_class("llama")(config)


def test_what_is_refused() -> None:
    far_away = FarPositions("yarn", TEACHER, CONTEXT)
    values = asdict(far_away)
    assert_refused(
        FarPositions.from_dict,
        [
            ({"values": 3}, ValueError, "expected the keys kind, teacher and context"),
            (
                {"values": {**values, "kind": "linear"}},
                ValueError,
                "kind: got 'linear', expected one of yarn, nope, cut",
            ),
            ({"values": {**values, "context": 32}}, ValueError, "context: got 32, .* at least 33"),
        ],
    )
    state = replace(LayerTable.preset(4), positions=far_away)
    windows = replace(LayerTable.preset(4, "window"), positions=far_away)
    assert_refused(
        made,
        [
            ({"layers": state}, UserError, "layer 0 is gated_deltanet, which reads no further"),
            ({"layers": windows, "family": "gemma3_text"}, UserError, "set by layer"),
            ({"layers": windows, "family": "mistral"}, UserError, "layer 0 of the teacher slides"),
            ({"layers": windows, "family": "smollm3"}, UserError, "layer 2 .* no rotary positions"),
            ({"layers": windows, "family": "gpt_oss"}, UserError, "rotary positions of gpt_oss cannot be extended"),
            (
                {"layers": table(replace(far_away, kind="cut")), "family": "gemma2"},
                UserError,
                "the teacher caps its scores, which cut distances do not",
            ),
            ({"layers": table(replace(far_away, kind="cut")), "bits": 4}, UserError, "cut distances need keys in 16"),
        ],
    )
