"""Prompts that a packed cache takes in one call: what they leave in it, and their attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_kernels import pack_prompt, prompt_attention
from deltanet_kernels.packed_cache.calls import EVERYTHING, PackedStepCall, PackGroupsCall
from deltanet_kernels.packed_cache.launches import pack_groups_triton, packed_step_triton_
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, quantised, restored
from deltanet_kernels.packed_cache.reference import append, torch_pack_groups
from tests.kernels.packed_cases import definition, empty, key_order, rounded_keys, tokens
from tests.kernels.test_decode_attention import bfloat16_products  # noqa: F401  a fixture
from tests.kernels.triton_mode import DEVICE, by_pytorch, by_triton

pytestmark = pytest.mark.usefixtures("rounding_to_nearest", "bfloat16_products")
both = pytest.mark.parametrize("by", [by_pytorch, by_triton], ids=["torch", "triton"])


@pytest.mark.parametrize(
    ("D", "dtype", "bits", "ordered"),
    [
        (64, torch.float32, 4, False),
        (64, torch.float32, 4, True),
        (64, torch.bfloat16, 8, False),
        (64, torch.float16, 4, False),
        (128, torch.bfloat16, 4, False),
        (128, torch.bfloat16, 4, True),
        (128, torch.float32, 8, False),
    ],
    ids=str,
)
def test_a_prompt_is_packed_as_its_tokens_are(D: int, dtype: torch.dtype, bits: int, ordered: bool) -> None:
    """Kernel, PyTorch and single tokens give the same bits, also where all numbers of a group are equal."""
    q, k, v = tokens(65, D, dtype, 2, 2, 2)
    k[0, 0, :32, 5], v[1, 1, 7, 32:] = 0.25, 0.0
    as_made = k.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection makes it
    order = key_order(D) if ordered else None
    call = PackGroupsCall(as_made[:, :, :64], v[:, :, :64], bits, order)
    found, wanted = (pack(call) for pack in (pack_groups_triton, torch_pack_groups))
    cache = empty(k, 2, bits, order)
    for t in range(65):
        one_token = [x[:, :, t : t + 1] for x in (q, k, v)]
        if t == 0 or t % GROUP:
            append(*one_token[1:], cache)
        else:  # the kernel packs a group that is complete
            packed_step_triton_(PackedStepCall(*(x.transpose(1, 2) for x in one_token), cache))
    for one, other, appended in zip(found, wanted, cache[:4], strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, appended)


PROMPTS = [  # tokens, window, sinks, cap, bits, with a key order
    (3, 3, 0, None, 4, False),
    (32, 32, 0, None, 8, False),
    (101, 101, 0, 3.0, 4, False),
    (101, 40, 4, None, 8, False),
    (160, 9, 2, 3.0, 4, True),
    (97, 64, 0, None, 4, True),
    (97, 64, 0, None, 8, False),
]


@both
@pytest.mark.parametrize(("T", "window", "sinks", "cap", "bits", "ordered"), PROMPTS)
def test_a_prompt_in_one_call(
    by: Any, bits: int, ordered: bool, T: int, window: int, sinks: int, cap: float | None
) -> None:
    """Against float64 query by query, and a ring against tokens one by one; strided inputs, two head sizes."""
    pack, attend = by(pack_prompt), by(prompt_attention)
    D = 128 if T == 97 else 64
    q, k, v = (x.transpose(1, 2) for x in tokens(T, D, torch.float32))
    v = v.contiguous()
    groups = min(-(-(window - 1) // GROUP), T // GROUP + 2)
    order = key_order(D) if ordered else None
    made, keys, values = pack(k, v, bits, groups, None, order)
    out, lse = attend(q, k, v, keys, values, window, sinks, 0.2, cap)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    cache = empty(k, groups, bits, order)
    for t in range(T):
        append(k[:, :, t : t + 1], v[:, :, t : t + 1], cache)
        if t % 7 < 2 or t % GROUP in (0, GROUP - 1):
            till = slice(0, t + 1)
            wanted, wanted_lse = definition(
                q[:, :, till], k[:, :, till], v[:, :, till], bits, window, sinks, EVERYTHING, cap, order=order
            )
            assert (out[:, t].double() - wanted[:, :, 0]).abs().max() < 5e-6 * wanted.abs().max() + 5e-6
            assert (lse[:, t].double() - wanted_lse).abs().max() < 1e-5
    for one, other in zip(made.tensors, cache.tensors, strict=True):
        assert one.shape == other.shape
    empty_places = max(0, groups - (T - 1) // GROUP)
    for one, other in zip(made[:4], cache[:4], strict=True):
        filled = one.shape[2] - empty_places
        assert torch.equal(one[:, :, :filled], other[:, :, :filled])
    own = SINKS + (T - 1) % GROUP + 1  # what follows is left from the group before it
    for one, other in zip(made[4:6], cache[4:6], strict=True):
        assert torch.equal(one[:, :, :own], other[:, :, :own])
    assert torch.equal(made.lengths, cache.lengths)


def straight_through(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: list[torch.Tensor], window: int, sinks: int,
    cap: float | None, edge: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`prompt_attention` over all pairs, with scale 0.2; PyTorch differentiates it."""
    T, repeats = q.shape[1], q.shape[2] // k.shape[2]
    place = torch.arange(T, device=q.device)
    distance = place[:, None] - place
    own = (place[:, None] // GROUP == place // GROUP)[None, None]
    reach = place[:, None] // edge * edge - place
    hidden = (distance < 0) | ((reach >= window) & (place >= sinks))
    far = [x + (torch.cat([y, x[:, y.shape[1] :]], 1) - x).detach() for x, y in zip((k, v), seen, strict=True)]
    (k, v), (far_k, far_v) = ([x.repeat_interleave(repeats, 2) for x in pair] for pair in ((k, v), far))
    scores = [torch.einsum("bqhd,bkhd->bhqk", q, x) * 0.2 for x in (k, far_k)]
    scores = scores if cap is None else [cap * (x / cap).tanh() for x in scores]
    joined = torch.where(own, *scores).masked_fill(hidden, -torch.inf)
    weights = joined.softmax(-1)
    near = torch.einsum("bhqk,bkhd->bqhd", weights * own, v)
    return near + torch.einsum("bhqk,bkhd->bqhd", weights * ~own, far_v), joined.logsumexp(-1).transpose(1, 2)


@both
@pytest.mark.parametrize(
    ("T", "window", "sinks", "cap", "D", "edge"),
    [
        (20, 9, 4, None, 64, 1),
        (70, 70, 0, 3.0, 64, 1),
        (70, 9, 2, None, 128, 1),
        (101, 40, 4, 3.0, 64, 1),
        (101, 33, 4, None, 64, 32),
        pytest.param(140, 64, 4, None, 128, 1, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_prompt(by: Any, T: int, window: int, sinks: int, cap: float | None, D: int, edge: int) -> None:
    """Those of the other form are added to those of k and v; they pass its rounding."""
    q, k, v = (x.transpose(1, 2) for x in tokens(T, D, torch.float32))
    seen = list(by_pytorch(pack_prompt)(k, v, 4)[1:])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = by(prompt_attention)(*leaves, *seen, window, sinks, 0.2, cap, edge)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted_o, wanted_lse = straight_through(*exact, [x.double() for x in seen], window, sinks, cap, edge)  # type: ignore[arg-type]
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), leaves, (do, dlse.to(lse.dtype)))
    wanted = torch.autograd.grad((wanted_o, wanted_lse), exact, (do.double(), dlse.double()))
    for one, other in zip((o, lse, *found), (wanted_o, wanted_lse, *wanted), strict=True):
        assert (one.double() - other).abs().max() < 1e-5 * other.abs().max()


@both
def test_a_prompt_of_keys_far_from_zero(by: Any) -> None:
    """Their other form is so coarse that scores in it differ by hundreds from those of a query's own group; float32 has
    steps of 0.0005 between such scores. PyTorch has one softmax of both on a CPU alone."""
    device = "cpu" if by is by_pytorch else DEVICE
    q, k, v = (x.transpose(1, 2).to(device) for x in tokens(101, 64, torch.float32))
    k[..., 5] += 400
    seen = list(by_pytorch(pack_prompt)(k, v, 4)[1:])
    found = by(prompt_attention)(100 * q, k, v, *seen, 101, 0, 0.2)
    wanted = straight_through(100 * q.double(), k.double(), v.double(), [x.double() for x in seen], 101, 0, None, 1)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() < 1e-3 * other.abs().max()


@both
@pytest.mark.parametrize("length", [1, 32, 65, 128])
def test_a_prompt_with_padding(by: Any, length: int, poisoned_memory: None) -> None:
    """As without it; the number of tokens is on the device. Of growing groups, those of the tokens come first, and
    places without one hold zeros."""
    pack = by(pack_prompt)
    k, v = (x.transpose(1, 2) for x in tokens(128, 64, torch.float32)[1:])
    for groups in (0, 2, 15, None):
        wanted, *wanted_seen = pack(k[:, :length], v[:, :length], 4, groups)
        made, *seen = pack(k, v, 4, groups, torch.tensor([length], device=k.device))
        for name, one, other in zip(made._fields, made.tensors, wanted.tensors, strict=False):
            own = one[:, :, : other.shape[2]] if groups is None and name != "lengths" else one
            assert torch.equal(own, other), (groups, name)
        assert not any(one[:, :, (length - 1) // GROUP :].any() for one in made[:4])
        for one, other in zip(seen, wanted_seen, strict=True):
            assert torch.equal(one[:, : other.shape[1]], other), groups
            assert one.isfinite().all()


@both
@pytest.mark.parametrize(("window", "sinks", "edge"), [(165, 0, 1), (40, 4, 1), (33, 4, 32)])
def test_prompts_in_one_row(by: Any, window: int, sinks: int, edge: int, poisoned_memory: None) -> None:
    """As each alone; on CUDA one may have no tokens, and tokens behind the last belong to none."""
    lengths = (2, 65, 1, 32, 0 if by is by_triton else 3, 31, 33)
    q, k, v = (x.transpose(1, 2) for x in tokens(168 if by is by_triton else sum(lengths), 64, torch.float32, 1))
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    order = key_order(64)
    for groups in (None, 2, 5):
        made, *seen = by(pack_prompt)(k, v, 4, groups, None, order, bounds, 65)
        out, lse = by(prompt_attention)(q, k, v, *seen, window, sinks, 0.2, None, edge, bounds, 65)
        assert all(x.isfinite().all() for x in seen)
        for row, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
            if not length:
                assert not made.lengths[row]
                assert not any(x[row].any() for x in made[:6])
                continue
            own = slice(start, start + length)
            alone, *later = by(pack_prompt)(k[:, own], v[:, own], 4, 2 if groups is None else groups, None, order)
            for name, x, other in zip(made._fields, made.tensors, alone.tensors, strict=False):
                assert torch.equal(x[row : row + 1], other), (name, row)
            for x, other in zip(seen, later, strict=True):
                assert torch.equal(x[:, own][:, : other.shape[1]], other), row
            wanted = by(prompt_attention)(*(x[:, own] for x in (q, k, v)), *later, window, sinks, 0.2, None, edge)
            torch.testing.assert_close(out[:, own], wanted[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse[:, own], wanted[1], rtol=1e-5, atol=1e-5)


def test_what_is_refused_of_a_row() -> None:
    q, k, v = (x.transpose(1, 2) for x in tokens(40, 64, torch.float32, 1))
    bounds = torch.tensor([0, 8, 40], device=DEVICE)
    with pytest.raises(ValueError, match="longest: got 41, needs the most tokens of a sequence"):
        pack_prompt(k, v, 4, cu_seqlens=bounds, longest=41)
    with pytest.raises(ValueError, match="length: got a tensor beside cu_seqlens, needs None"):
        pack_prompt(k, v, 4, length=bounds[:1], cu_seqlens=bounds, longest=32)
    with pytest.raises(ValueError, match=r"keys: got shape .* needs .* = \[1, 40, 2, 64\]"):
        prompt_attention(q, k, v, k[:, :32], v[:, :32], 40, 0, 0.2, cu_seqlens=bounds, longest=32)
    with pytest.raises(ValueError, match="prompt_attention has no gradients"):
        prompt_attention(q, k.clone().requires_grad_(), v, k, v, 40, 0, 0.2, cu_seqlens=bounds, longest=32)


@both
@pytest.mark.parametrize(
    ("order", "dtype"), [(None, torch.float16), (key_order(64), torch.bfloat16)], ids=["", "ordered"]
)
def test_a_prompt_in_sixteen_bits(by: Any, order: torch.Tensor | None, dtype: torch.dtype) -> None:
    """The restored numbers are those of the layout, bit by bit."""
    q, k, v = (x.transpose(1, 2) for x in tokens(101, 64, dtype))
    _, keys, values = by(pack_prompt)(k, v, 4, None, None, order)
    out, _ = by(prompt_attention)(q, k, v, keys, values, 101, 0, 0.2)
    groups = k[:, :96].transpose(1, 2).split(GROUP, dim=2)
    rounded = torch.cat([rounded_keys(group, 4, order) for group in groups], dim=2).transpose(1, 2)
    assert torch.equal(keys[:, SINKS:], rounded[:, SINKS:])
    rounded = restored(*quantised(v[:, :96].unflatten(-1, (-1, GROUP)), 4), 4, dtype).flatten(-2)
    assert torch.equal(values[:, SINKS:], rounded[:, SINKS:])
    assert torch.equal(keys[:, :SINKS], k[:, :SINKS])
    assert torch.equal(values[:, :SINKS], v[:, :SINKS])
    wanted, _ = definition(*(x.transpose(1, 2) for x in (q, k, v)), 4, EVERYTHING, 0, EVERYTHING, None, order=order)
    assert (out[:, -1].double() - wanted[:, :, 0]).norm() < torch.finfo(dtype).eps * wanted.norm()
