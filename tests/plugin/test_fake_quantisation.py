"""The attention to a cache of few bits, against a dense float64 form of its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache
from deltanet_hf.models.cache_bits import set_cache_bits, stored_bytes
from deltanet_kernels import window_attention
from deltanet_kernels.packed_cache.layout import GROUP, SINKS
from support.tiny_models import READS_ALL, mixed_mixture_table, tiny_mixture, tiny_student, tiny_teacher


def in_8_bits(x: Tensor) -> Tensor:
    """Blocks of 16 channels on 256 whole multiples of the power of two of which their range, with 0, has 128 to 255."""
    blocks = x.unflatten(-1, (-1, 16))
    low, high = blocks.amin(-1, keepdim=True).clamp_max(0), blocks.amax(-1, keepdim=True).clamp_min(0)
    step = 2 ** ((high - low).log2().floor() - 7)
    least = (low / step).round().clamp_min(-255)
    return ((blocks / step).round().clamp(least, least + 255) * step).flatten(-2)


def on_even_steps(x: Tensor, dim: int, bits: int) -> Tensor:
    """2^bits even steps, the middle of which is z h: z the whole number whose multiple of h is next to the numbers'.

    h is a 32nd of its power of two, the nearest to what the range and the middle take. All is chosen in float32,
    because halves are frequent.
    """
    most = min(15, 2**bits - 1)
    low, high = x.amin(dim, keepdim=True).float(), x.amax(dim, keepdim=True).float()
    h = torch.maximum((high - low) * (0.5 / most), (low + high).abs() * (0.5 / 63))
    power = 2 ** h.log2().floor()
    h = (h / power * 32 + 0.5).floor() / 32 * power
    z = ((low + high) / 2 / h).round().clamp(-64, 63)
    step = 2 * h / max(1, 2**bits // 16)
    least = (z * h - (2**bits - 1) / 2 * step).bfloat16().float()
    codes = ((x.float() - least) / step).round().clamp(0, 2**bits - 1)
    return least.double() + codes.double() * step.double()


def dense(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, bits: int, cap: float | None) -> Tensor:
    """The definition, token by token: all in 8 bits, then earlier complete groups rounded but for the first tokens."""
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v = in_8_bits(k), in_8_bits(v)
    rounded_k, rounded_v = k.clone(), v.clone()
    for start in range(0, length // GROUP * GROUP, GROUP):
        group = slice(start, start + GROUP)
        rounded_k[:, group] = on_even_steps(k[:, group], 1, bits)
        for first in range(0, v.shape[-1], GROUP):
            part = slice(first, first + GROUP)
            rounded_v[:, group, :, part] = on_even_steps(v[:, group, :, part], -1, bits)
    rounded_k[:, :SINKS], rounded_v[:, :SINKS] = k[:, :SINKS], v[:, :SINKS]
    outputs = []
    for t in range(length):
        seen = [i for i in range(t + 1) if t - i < window or i < sinks]
        own = torch.tensor([i // GROUP == t // GROUP for i in seen])[None, :, None, None]
        keys = torch.where(own, k[:, seen], rounded_k[:, seen]).repeat_interleave(repeats, 2)
        values = torch.where(own, v[:, seen], rounded_v[:, seen]).repeat_interleave(repeats, 2)
        scores = torch.einsum("bhd,bkhd->bhk", q[:, t], keys) * 0.3
        scores = scores if cap is None else cap * (scores / cap).tanh()
        outputs.append(torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), values))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    ("window", "sinks", "cap", "widths"),
    [
        (200, 0, None, (8, 4, 3)),
        (40, 4, None, (8, 4, 3, 2)),
        (64, 4, 2.0, (8, 4, 3, 2)),
        (9, 4, None, (8, 4, 3, 2)),
        (200, 4, 2.0, (2,)),  # without a cap, what 2 bits change is so much that its exchange rounds to 1e-11
    ],
)
def test_is_its_definition(window: int, sinks: int, cap: float | None, widths: tuple[int, ...]) -> None:
    for bits in widths:
        torch.manual_seed(bits)
        q, k, v = (2 * torch.randn(2, 150, heads, 64).double() for heads in (4, 2, 2))  # rounded in float32
        text = QuantisedKVCache(QuantisedCacheSpec(bits, window, sinks), {}, None, keep_state=False)
        output, _ = text.attend(q, k, v, 0.3, cap)
        expected = dense(q, k, v, window, sinks, bits, cap)
        assert (output - expected).abs().max() < 1e-12 * expected.abs().max(), bits


def test_gradients_pass_the_rounding() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))
    output, lse = QuantisedKVCache(QuantisedCacheSpec(8, None), {}, None).attend(q, k, v, 0.2, None)
    grads = torch.autograd.grad(output.square().sum() + lse.sum(), (q, k, v))
    exact, exact_lse = window_attention(q, k, v, 70, 0, 0.2)
    wanted = torch.autograd.grad(exact.square().sum() + exact_lse.sum(), (q, k, v))
    for found, reference in zip(grads, wanted, strict=True):
        assert (found - reference).norm() < 0.03 * reference.norm()  # 8 bits of rounding, and not zero


@torch.no_grad()
def test_every_kind_of_attention_takes_the_setting() -> None:
    """Softmax layers, single heads, windows and windows with a state; 16 bits gives the model back."""
    ids = torch.arange(2, 2 + 100)[None] % 60
    for model in (tiny_teacher("llama"), tiny_mixture("llama", mixed_mixture_table())):
        before = model(ids, use_cache=False).logits
        rounded = set_cache_bits(model, 4)(ids, use_cache=False).logits
        change = (rounded - before).abs()  # of tokens that see the first group alone, in 8 bits, less than of others
        assert 1e-5 < change[:, :GROUP].mean() < 0.2 * change[:, GROUP:].mean()
        assert torch.equal(set_cache_bits(model, 16)(ids, use_cache=False).logits, before)
    with pytest.raises(UserError, match="cache bits"):
        set_cache_bits(model, 5)
    with pytest.raises(UserError, match="3 bits are computed for whole sequences without a cache"):
        set_cache_bits(model, 3)(ids)


def test_layers_without_such_a_form_stay_as_they_are_at_16_bits() -> None:
    """Every training stage sets the bits, 16 unless its recipe says otherwise."""
    model = tiny_student("llama", mixer="alibi")
    assert set_cache_bits(model, 16) is model
    with pytest.raises(UserError, match="alibi layers keep every token"):
        set_cache_bits(model, 4)
    with pytest.raises(UserError, match="got 5 sinks, of which a cache of 4 bits keeps 4"):
        set_cache_bits(tiny_student("llama", mixer="window", window=40, sinks=5), 4)


def test_bytes_follow_the_bits() -> None:
    model = tiny_teacher("llama", head_dim=64)
    token = stored_bytes(model, 1, 16)
    assert stored_bytes(model, 640, 16) == 640 * token
    own = (GROUP + SINKS) * token // 4 * 9 // 8 + 4 * 4  # with scales, and a count per layer
    assert stored_bytes(model, 640 + GROUP, 4) == 640 * token * 9 // 64 + own
    for mixer in ("window", "gated_deltanet+window"):
        changes = READS_ALL if "+" in mixer else {}
        windows = tiny_student("llama", mixer=mixer, window=40, sinks=3, **changes)
        states = stored_bytes(windows, 0, 16)
        token = stored_bytes(windows, 1, 16) - states
        assert token == 2 * 2 * 8 * 4 * 4  # two heads of 8 channels, float32, in four layers
        assert [stored_bytes(windows, tokens, 16) - states for tokens in (42, 43, 44)] == [
            42 * token,
            43 * token,
            43 * token,
        ]
    sliding = tiny_teacher("mistral")
    token = stored_bytes(sliding, 1, 16)
    assert [stored_bytes(sliding, tokens, 16) for tokens in (7, 8, 9)] == [7 * token, 8 * token, 8 * token]
