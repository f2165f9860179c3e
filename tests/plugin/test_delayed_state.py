"""The state of what has left the window, against its definition in float64: every form, every rule that may delay."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from deltanet_hf.errors import UserError
from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.fast.packed import FastDelayedRule
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.cache.quantised_kv_cache import quantised_prompt, straight_through
from deltanet_hf.mixers.cache.sinks_apart import with_learned_sinks
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer import DeltaRule
from deltanet_hf.mixers.layer.layer_call import CacheView, MixCall
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.models.cache_bits import add_key_order, set_cache_bits
from deltanet_kernels import round_state
from support.plain_form import plain_form
from support.tiny_models import tiny_student

pytestmark = pytest.mark.usefixtures("float64")

GROUP = 32
DELAYING = [name for name, kind in MIXERS.items() if issubclass(kind, DeltaRule) and kind.may_delay]


def layer(
    mixer: str = "gated_deltanet", window: int = 33, bits: int = 16, family: str = "llama", **changes: Any
) -> tuple[Any, Mixer]:
    """The second layer of a tiny student, which no family slides, with weights that all have an effect; its model."""
    settings = {"window": window, "delayed": True, "k_offset": False, "conv_size": 0, **changes}
    model = tiny_student(family, mixer=mixer, **settings).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.model.layers[1].self_attn.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    add_key_order(set_cache_bits(model, bits))
    for own in model.model.layers:
        order = own.self_attn.window_branch.key_order
        order[:, 0] = torch.rand(order[:, 0].shape, generator=generator).argsort()
        order[:, 1] = order[:, 0].argsort()
    return model, model.model.layers[1].self_attn


def inputs(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def by_definition(model: Any, mixer: Mixer, x: torch.Tensor, bound: int | None = None) -> torch.Tensor:
    """Token by token: attention to what the window shows, the rule over what has left it, written one by one.

    With a bound, sinks outside of the window are seen as from no further position.
    """
    branch = mixer.window_branch
    (B, T, _), bits = x.shape, branch.cache_bits
    projected = mixer.project(x)
    rotary, place = getattr(model.model.rotary_emb, "own", model.model.rotary_emb), torch.arange(T)[None]
    q, k, v = mixer.window_inputs(projected, rotary(x, place))
    for_sinks = q if bound is None else mixer.window_inputs(projected, rotary(x, place.clamp_max(bound)))[0]
    far_k, far_v = k, v  # as queries of later groups, and the state, get them
    if bits < 16:
        k, v, seen, _ = quantised_prompt(branch.cache_spec, k, v, keep_state=False)
        far_k, far_v = (straight_through(part, other) for part, other in zip((k, v), seen, strict=True))
    times = mixer.kv_repeats
    rule_q, rule_k, rule_v = mixer.activated(q, *(x.repeat_interleave(times, 2) for x in (far_k, far_v)))
    gates = tuple(gate + (gate.bfloat16() - gate).detach() for gate in mixer.gates(projected, None))
    outputs, state, written = [], None, branch.sinks
    for t in range(T):
        own, left = t // GROUP * GROUP, max(0, (t // GROUP - branch.groups) * GROUP)
        while written < left:
            at = slice(written, written + 1)
            token = (part[:, at] for part in (rule_q, rule_k, rule_v))
            _, state = mixer.mix(MixCall(*token, tuple(gate[:, at] for gate in gates), None, state, True))
            written += 1
        now = slice(t, t + 1)
        if state is None:
            far = torch.zeros(B, 1, mixer.num_heads, mixer.head_dim, dtype=x.dtype)
        else:  # a token that writes nothing and reads
            still = tuple(torch.zeros_like(gate[:, :1]) for gate in gates)
            far, _ = mixer.mix(MixCall(rule_q[:, now], rule_k[:, :1] * 0, rule_v[:, :1] * 0, still, None, state))
        seen = sorted({*range(min(branch.sinks, t + 1)), *range(left, t + 1)})
        exact = torch.tensor([place >= own or place < branch.sinks for place in seen])[None, :, None, None]
        keys, values = (
            torch.where(exact, near[:, seen], later[:, seen]).repeat_interleave(mixer.num_heads // near.shape[2], 2)
            for near, later in ((k, far_k), (v, far_v))
        )
        far_sink = torch.tensor([place < min(branch.sinks, left) for place in seen])
        scores, at_bound = (torch.einsum("bhd,bshd->bhs", one[:, t], keys) * branch.scale for one in (q, for_sinks))
        scores = torch.where(far_sink, at_bound, scores)
        if branch.softcap is not None:
            scores = branch.softcap * (scores / branch.softcap).tanh()
        near = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), values)[:, None]
        near, lse = with_learned_sinks(near, scores.logsumexp(-1)[:, None], branch.learned_sinks)
        if state is not None and t == left + GROUP * branch.groups and mixer.settings.state_dtype == "int8":
            codes, scale = round_state(state["state"])  # after the read of the first token of a group
            state = {**state, "state": codes * scale.unsqueeze(-1)}
        far = mixer.gated_norm(far, mixer.project(x[:, now]).gate)
        count = t + 1 - len(seen)
        logit = branch.share_proj(x[:, now]) + branch.slopes.far_slope * math.log(max(count, 1))
        share = (logit - branch.slopes.near_slope * lse).sigmoid().unsqueeze(-1) * (count > 0)
        outputs.append(near + share * (far - near))
    return mixer.o_proj(torch.cat(outputs, 1).flatten(-2))


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def angles(model: Any, x: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
    return model.model.rotary_emb(x, torch.arange(x.shape[1])[None] if positions is None else positions)


@pytest.mark.parametrize("mixer", DELAYING)
def test_a_row_is_its_definition(mixer: str) -> None:
    model, kind = layer(mixer)
    x = inputs(140)
    close(kind(x, angles(model, x))[0], by_definition(model, kind, x))


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 1},
        {"window": 70},
        {"sinks": 0},
        {"bits": 4},
        {"bits": 8, "window": 1},
        {"expand_kv": True},
        {"expand_kv": True, "shared_kv": True},
        {"k_offset": True, "qk_activation": "silu", "v_activation": "silu"},
    ],
    ids=str,
)
def test_settings(changes: dict[str, Any]) -> None:
    model, kind = layer(**changes)
    x = inputs(140)
    close(kind(x, angles(model, x))[0], by_definition(model, kind, x))


@pytest.mark.parametrize(
    ("bits", "window", "cuts"),
    [
        *((bits, 33, [1, 31, 33, 64, 11]) for bits in (16, 8, 4)),
        *((bits, 65, [128, 1, 11]) for bits in (16, 8, 4)),
        *((bits, 33, [1] * 140) for bits in (16, 4)),
        (8, 65, [1] * 140),
        *((bits, 65, [64, 76]) for bits in (16, 4)),
        *((bits, 1, [32, 1, 30, 1, 1, 1]) for bits in (16, 8)),
    ],
)
@torch.no_grad()
def test_a_prompt_in_parts(bits: int, cuts: list[int], window: int) -> None:
    model, kind = layer(bits=bits, window=window)
    x = inputs(140)
    wanted = by_definition(model, kind, x)
    cache, start = DynamicCache(config=model.config), 0
    for size in cuts:
        part = slice(start, start + size)
        positions = torch.arange(start, start + size)[None]
        close(kind(x[:, part], angles(model, x[:, part], positions), past_key_values=cache)[0], wanted[:, part])
        start += size


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
@torch.no_grad()
def test_capped_scores_and_learned_sinks(family: str, bits: int) -> None:
    """In every form of the window: a row, whole and in parts, and a step."""
    model, kind = layer(family=family, bits=bits)
    x = inputs(110)
    wanted, positions = by_definition(model, kind, x), torch.arange(110)[None]
    close(kind(x, angles(model, x))[0], wanted)
    cache, sizes = DynamicCache(config=model.config), [70, 9, 1, 30]
    parts = zip(x.split(sizes, 1), positions.split(sizes, 1), strict=True)
    found = [kind(part, angles(model, part, at), past_key_values=cache)[0] for part, at in parts]
    close(torch.cat(found, 1), wanted)


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
@torch.no_grad()
def test_padding(bits: int, side: str) -> None:
    """Rows of different lengths give what they give alone: without a cache, and then step by step."""
    model, kind = layer(bits=bits)
    lengths, length, further = [140, 101], 140, 40
    x = inputs(length + further)
    place = torch.arange(length)
    real = torch.ones(2, length, dtype=torch.bool)
    real[1] = {"left": place >= 39, "right": place < 101, "holes": (place < 7) | (place >= 46)}[side]
    positions = real.long().cumsum(-1) - 1
    turned = angles(model, x[:, :length], positions.clamp_min(0))
    whole = kind(x[:, :length], turned, attention_mask=real.long())[0]
    cache = DynamicCache(config=model.config)
    kept = kind(x[:, :length], turned, attention_mask=real.long(), past_key_values=cache)[0]
    mask, steps = real, []
    for t in range(length, length + further):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1)
        at = angles(model, x[:, t : t + 1], mask.long().sum(-1, keepdim=True) - 1)
        steps.append(kind(x[:, t : t + 1], at, attention_mask=mask.long(), past_key_values=cache)[0])
    for row in range(2):
        alone = torch.cat([x[row : row + 1, :length][:, real[row]], x[row : row + 1, length:]], 1)
        wanted = by_definition(model, kind, alone)[0]
        close(whole[row][real[row]], wanted[: lengths[row]])
        close(kept[row][real[row]], wanted[: lengths[row]])
        close(torch.cat(steps, 1)[row], wanted[lengths[row] :])


def test_sequences_in_one_row() -> None:
    """Each gives what it gives alone, and so do its gradients."""
    model, kind = layer()
    x = inputs(220, batch=1).requires_grad_()
    bounds = [0, 3, 100, 101, 210]
    positions = torch.cat([torch.arange(b - a) for a, b in zip(bounds, [*bounds[1:], 220], strict=False)])[None]
    packed = kind(x, angles(model, x, positions), cu_seq_lens_q=torch.tensor(bounds))[0]
    wanted = torch.cat([by_definition(model, kind, x[:, a:b]) for a, b in pairwise(bounds)], 1)
    close(packed[:, :210], wanted)
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (ours,) = torch.autograd.grad((packed[:, :210] * up).sum(), x, retain_graph=True)
    (theirs,) = torch.autograd.grad((wanted * up).sum(), x)
    close(ours, theirs)


BEGIN = {
    "short and long": (1, 100, 31, 32, 33, 3, 140, 65, 2),
    "no group has left": (32, 1, 64, 3),
    "fewer than a window": (20, 5),
    "longer than all windows before": (5, 197, 40),
}


@pytest.mark.parametrize("lengths", BEGIN.values(), ids=BEGIN)
@pytest.mark.parametrize(
    ("mixer", "changes"),
    [
        *((mixer, {}) for mixer in DELAYING),
        *(("gated_deltanet", {"bits": bits, "window": window}) for bits in (16, 8, 4) for window in (33, 65)),
        ("gated_deltanet", {"bits": 4, "state_dtype": "int8", "expand_kv": True}),
        ("gated_deltanet", {"window": 1}),
        ("gated_deltanet", {"window": 1, "bits": 4, "state_dtype": "bfloat16"}),
        ("kda", {"bits": 8}),
        ("gated_deltanet", {"family": "gpt_oss", "bits": 4}),
        ("gated_deltanet", {"family": "gemma2", "bits": 4, "window": 97}),
    ],
    ids=str,
)
@torch.inference_mode()
def test_prompts_that_begin_in_one_row(mixer: str, changes: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """As a server reads them, by the layer and by its fast form: output and state of each as of it alone."""
    model, kind = layer(mixer, **changes)
    x, bounds = inputs(sum(lengths), 1), torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rotation = angles(model, x, torch.cat([torch.arange(length) for length in lengths])[None])
    alone = [MixerCacheLayer() for _ in lengths]
    prompts = zip(x.split(lengths, 1), alone, strict=True)
    wanted = torch.cat([kind(part, angles(model, part), past_key_values=cache)[0] for part, cache in prompts], 1)
    for form in (kind, fast_mixer(kind, False)):
        together = MixerCacheLayer()
        view = CacheView(together, lengths=lengths)
        close(form(x, rotation, past_key_values=view, cu_seq_lens_q=bounds)[0], wanted)
        assert together.state.keys() == alone[0].state.keys()
        for name, held in together.state.items():
            theirs = torch.cat([cache.state[name] for cache in alone])
            assert held.dtype == theirs.dtype
            torch.testing.assert_close(
                held, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("padded", [0, 39])
def test_gradients_of_rows(padded: int) -> None:
    """Those of each row alone; before the second is padding."""
    model, kind = layer(bits=4)
    x = inputs(140).requires_grad_()
    parameters = [parameter for name, parameter in kind.named_parameters() if "slope" not in name]
    up = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    up[1, :padded] = 0
    mask = (up != 0).any(-1).long()
    found = kind(x, angles(model, x, (mask.cumsum(-1) - 1).clamp_min(0)), attention_mask=mask)[0]
    rows = ((slice(0, 1), slice(0, 140)), (slice(1, 2), slice(padded, 140)))
    wanted = torch.stack([(by_definition(model, kind, x[row]) * up[row]).sum() for row in rows]).sum()
    ours, theirs = (torch.autograd.grad(loss, [x, *parameters]) for loss in ((found * up).sum(), wanted))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)


@torch.no_grad()
def test_a_text_that_fits_into_the_window_gets_the_teachers_attention() -> None:
    model, kind = layer(window=65)
    x = inputs(96)
    changed = kind(x, angles(model, x))[0]
    kind.norm.weight.add_(5.0)  # type: ignore[union-attr]
    assert torch.equal(kind(x, angles(model, x))[0], changed)
    longer = inputs(97)
    before = kind(longer, angles(model, longer))[0]
    kind.norm.weight.add_(5.0)  # type: ignore[union-attr]
    assert not torch.equal(kind(longer, angles(model, longer))[0], before)


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 8, "state_dtype": "bfloat16"},
        {"bits": 4, "state_dtype": "int8"},
        {"bits": 4, "output_gate": False, "allow_neg_eigval": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_the_fast_form(changes: dict[str, Any]) -> None:
    """Its kernels for a prompt and for steps, with capped scores, beside the operations of the layer."""
    model, _ = layer(**changes)
    for own in model.model.layers:
        own.self_attn.window_branch.softcap = 0.5
        own.self_attn.norm.eps = 1e-3
    tokens = torch.randint(3, 97, (2, 135), generator=torch.Generator().manual_seed(2))

    def read(parts: tuple[int, ...]) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        logits = [model(part, past_key_values=cache).logits for part in tokens.split(parts, 1)]
        return torch.cat(logits, 1)

    called = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_prompt", "_step"):
            kernels = getattr(FastDelayedRule, name)
            patch.setattr(FastDelayedRule, name, lambda *call, of=kernels: (called.append(of), of(*call))[1])
        for parts in ((135,), (95, *[1] * 40), (50, 9, *[1] * 76)):  # the first group leaves in a prompt, or a step
            with plain_form():
                wanted = read(parts)
            called.clear()
            close(read(parts), wanted)
            assert len(called) == len(model.model.layers) * (1 + parts.count(1))


@torch.inference_mode()
def test_a_step_of_sequences_in_rows_of_larger_tensors() -> None:
    """As a server keeps them; a group leaves with the step."""
    model, kind = layer(bits=4, state_dtype="int8")
    fast, x = fast_mixer(kind, False), inputs(97)
    before, token = x[:, :96], x[:, 96:]
    alone, larger = MixerCacheLayer(), MixerCacheLayer()
    fast(before, angles(model, before), past_key_values=alone)
    for name, held in alone.state.items():
        larger.state[name] = held.new_zeros(5, *held.shape[1:]).index_copy_(0, torch.tensor([3, 1]), held)
    larger.is_initialized = True
    rotation = angles(model, token, torch.full((2, 1), 96))
    wanted = fast(token, rotation, past_key_values=alone)[0]
    view = CacheView(larger, torch.tensor([3, 1], dtype=torch.int32))
    assert torch.equal(fast(token, rotation, past_key_values=view)[0], wanted)
    for name, held in alone.state.items():
        assert torch.equal(larger.state[name][[3, 1]], held)
        assert not larger.state[name][[0, 2, 4]].any()


@pytest.mark.parametrize(
    "changes", [{"bits": 4, "state_dtype": "int8"}, {"bits": 8, "window": 65, "expand_kv": True}], ids=str
)
@pytest.mark.parametrize("cuts", [(5, 20, 7, 32, 64, 72), (96, 2, 30, 33, 39), (64, 136), (31, 65, 104)], ids=str)
@torch.inference_mode()
def test_a_servers_parts_of_a_prompt(changes: dict[str, Any], cuts: tuple[int, ...]) -> None:
    """By the kernels of the fast form, as the operations of the layer: the outputs, and what is kept after each."""
    model, kind = layer(**changes)
    fast, x = fast_mixer(kind, False), inputs(sum(cuts), 1)
    plain, served, start = MixerCacheLayer(), MixerCacheLayer(), 0
    for part in x.split(cuts, 1):
        rotation = angles(model, part, torch.arange(start, start + part.shape[1])[None])
        wanted = kind(part, rotation, past_key_values=plain)[0]
        close(fast(part, rotation, past_key_values=CacheView(served))[0], wanted)
        start += part.shape[1]
        assert plain.state.keys() == served.state.keys()
        for name, held in plain.state.items():
            close(served.state[name], held)


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, True),
        ({"window": 1}, False),
        ({"bits": 16}, False),
        ({"k_offset": True}, False),
        ({"qk_activation": "silu"}, False),
        ({"mixer": "gated_linear"}, False),
        ({"family": "gpt_oss"}, False),
    ],
    ids=str,
)
def test_which_layers_the_fast_form_has_kernels_for(changes: dict[str, Any], served: bool) -> None:
    """Windows of whole groups before a query's own, in 8 and 4 bits, and the plain rule."""
    assert FastDelayedRule.serves(layer(**{"bits": 4, **changes})[1]) is served


@torch.no_grad()
def test_a_state_in_8_bits_is_rounded_once_a_group() -> None:
    """Within a group the codes stay, and their error is that of one rounding: half a step of each row."""
    model, kind = layer(bits=4, state_dtype="int8")
    exact_model, exact = layer(bits=4)
    x = inputs(200, batch=1)
    cache, other = DynamicCache(config=model.config), DynamicCache(config=exact_model.config)
    seen, outputs = [], []
    for t in range(200):
        at = angles(model, x[:, t : t + 1], torch.tensor([[t]]))
        outputs.append(kind(x[:, t : t + 1], at, past_key_values=cache)[0])
        exact(x[:, t : t + 1], at, past_key_values=other)
        state, wanted = cache.layers[1].state, other.layers[1].state["state"]
        seen.append(state["state"].clone())
        assert t % GROUP == 0 or torch.equal(seen[-1], seen[-2])
        error = (state["state"] * state["state_scale"].unsqueeze(-1) - wanted).abs().amax(-1)
        assert (error <= 0.51 * max(0, t // GROUP - 1) * state["state_scale"]).all()
    assert error.max() > 0
    close(torch.cat(outputs, 1), by_definition(model, kind, x))


def test_the_states_of_sliding_layers_have_all_tokens() -> None:
    for given, wanted in (("int8", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        settings = layer(family="gemma2", state_dtype=given)[0].model.layers[0].self_attn.settings
        assert (settings.delayed, settings.state_dtype) == (False, wanted)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="delayed: got true, but the state of comba"):
        layer("comba")
    with pytest.raises(ValueError, match=r"delayed: got true, needs a window, .* or set delayed to false"):
        layer(conv_size=4)
    with pytest.raises(UserError, match=r"got 3 sinks beside a state of .*, which needs 4 in 8 bits"):
        layer(sinks=3, bits=8)
