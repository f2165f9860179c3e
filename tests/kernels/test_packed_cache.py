"""A packed cache against its definition in float64, however it was filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_kernels import pack_groups, packed_attention, packed_part, packed_step_, round_tokens
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.packed_cache import launches
from deltanet_kernels.packed_cache.calls import (
    EVERYTHING,
    PackedAttentionCall,
    PackedPartCall,
    PackedStepCall,
    PackGroupsCall,
)
from deltanet_kernels.packed_cache.launches import (
    pack_groups_triton,
    packed_attention_op,
    packed_attention_triton,
    packed_step_triton_,
)
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, quantised, restored
from deltanet_kernels.packed_cache.reference import append, torch_packed_attention, torch_packed_step_
from tests.kernels.packed_cases import definition, empty, key_order, tokens
from tests.kernels.test_decode_attention import bfloat16_products  # noqa: F401  a fixture
from tests.kernels.triton_mode import DEVICE, by_pytorch, by_triton

pytestmark = pytest.mark.usefixtures("rounding_to_nearest", "bfloat16_products")
both = pytest.mark.parametrize("by", [by_pytorch, by_triton], ids=["torch", "triton"])
FORMS: dict[str, Any] = {"torch": torch_packed_attention, "triton": packed_attention_triton}


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_are_rounded_to_8_bits(by: Any, dtype: torch.dtype) -> None:
    """Of strided inputs, against PyTorch's significands and exponents; rounding twice changes nothing."""
    x = (
        torch.randn(2, 70, 7, 128, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-4, 1.0, 60.0, 0.0, 1.0, 1.0, 1.0])[:, None]
    )
    x[0, 0, 1, :32], x[0, 1, 1, 3] = torch.tensor(127.6 / 64), 1e-30
    k, v = (part.to(DEVICE, dtype) for part in x.split([64, 64], dim=-1))
    found = by(round_tokens)(k, v)
    for y, rounded in zip((k, v), found, strict=True):
        blocks = y.double().cpu().unflatten(-1, (-1, 16))
        low, high = blocks.amin(-1, keepdim=True).clamp_max(0), blocks.amax(-1, keepdim=True).clamp_min(0)
        steps = torch.ldexp(torch.ones(()).double(), torch.frexp((high - low).float()).exponent - 8)
        least = (low / steps).round().clamp_min(-255)
        wanted = ((blocks / steps).round().clamp(least, least + 255) * steps).flatten(-2)
        assert rounded.dtype == dtype
        assert rounded.is_contiguous()
        assert torch.equal(rounded.double().cpu(), wanted)
    assert all(torch.equal(one, other) for one, other in zip(by(round_tokens)(*found), found, strict=True))
    leaves = [part.detach().requires_grad_() for part in (k, v)]
    grads = torch.autograd.grad(by(round_tokens)(*leaves), leaves, found)
    assert all(torch.equal(one, other) for one, other in zip(grads, found, strict=True))


CASES = [  # tokens, window, sinks, limit, cap, bits, with a key order, large heads
    (3, EVERYTHING, 0, EVERYTHING, None, 4, False, True),
    (33, EVERYTHING, 0, EVERYTHING, 3.0, 8, False, True),
    (105, EVERYTHING, 0, EVERYTHING, None, 4, False, False),
    (105, EVERYTHING, 0, EVERYTHING, None, 4, True, False),
    (105, EVERYTHING, 0, EVERYTHING, None, 8, False, True),
    (105, 40, 4, EVERYTHING, None, 8, False, False),
    (105, 40, 4, 90, 3.0, 4, True, True),
    (97, 33, 2, EVERYTHING, None, 8, False, False),
    (105, 9, 0, EVERYTHING, None, 4, False, False),
]


@pytest.mark.parametrize(("form", "head_sizes"), [("torch", (16, 96)), ("triton", (64, 128))], ids=["torch", "triton"])
@pytest.mark.parametrize(("T", "window", "sinks", "limit", "cap", "bits", "ordered", "large"), CASES)
def test_a_token_at_a_time(
    form: str, head_sizes: tuple[int, int], large: bool, bits: int, ordered: bool, T: int, window: int, sinks: int,
    limit: int, cap: float | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A ring holds as many groups as a window sees, and the second sequence begins later.

    Four sinks meet other queries than the window.
    """
    D = head_sizes[large]
    dtype, rounding = (torch.float64, 1e-13) if form == "torch" else (torch.float32, 2e-6)
    if form == "triton" and D == 128 and sinks == 0:
        monkeypatch.setitem(launches.LEAST_SPAN, 128, 1)
        monkeypatch.setattr(launches, "multiprocessors", lambda _: 1000)
    attend = FORMS[form]
    q, k, v = tokens(T, D, dtype)
    groups = min(-(-(window - 1) // GROUP), T // GROUP + 2)
    order = key_order(D) if ordered else None
    cache = empty(k, groups, bits, order)
    late = 20 if T == 105 else 0
    for t in range(T):
        if t == late:
            cache.lengths[1] = 0
        append(k[:, :, t : t + 1], v[:, :, t : t + 1], cache)
    assert cache.lengths.tolist() == [T, T - late]
    first_q = q.flip(-1) if sinks == SINKS else None
    call = PackedAttentionCall(q[:, :, -1:], cache, window, sinks, limit, 0.2, cap)
    found, lse = attend(call if first_q is None else call._replace(first_q=first_q[:, :, -1:]))
    for row, first in ((0, 0), (1, late)):
        one = slice(row, row + 1)
        own = q[one], k[one, :, first:], v[one, :, first:]
        own_first = None if first_q is None else first_q[one]
        wanted, wanted_lse = definition(*own, bits, window, sinks, limit, cap, order=order, first_q=own_first)
        assert (found[one].double() - wanted).abs().max() < rounding * (wanted.abs().max() + 1)
        assert (lse[one].double() - wanted_lse).abs().max() < 5 * rounding


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("order", "dtype"), [(None, torch.float16), (key_order(64), torch.bfloat16)], ids=["", "ordered"]
)
def test_sixteen_bits(form: str, order: torch.Tensor | None, dtype: torch.dtype) -> None:
    attend = FORMS[form]
    q, k, v = tokens(100, 64, dtype)
    cache = empty(k, 3, 4, order)
    for t in range(100):
        append(k[:, :, t : t + 1], v[:, :, t : t + 1], cache)
    found, _ = attend(PackedAttentionCall(q[:, :, -1:], cache, scale=0.2))
    wanted, _ = definition(q, k, v, 4, EVERYTHING, 0, EVERYTHING, None, order=order)
    assert found.dtype == dtype
    assert (found.double() - wanted).norm() < torch.finfo(dtype).eps * wanted.norm()


STEPS = (0, SINKS - 1, SINKS, GROUP, 2 * GROUP, 2 * GROUP + 1)
"""Those of a kernel: the first and the last sink, a token after them, two complete groups, and a token after these."""


@pytest.mark.parametrize(("R", "rows", "bits"), [(64, 2, 4), (32, 1, 8)])
def test_a_step_rotates_puts_and_attends(R: int, rows: int, bits: int) -> None:
    """Slices of one projection, as the layers pass them, against rotation, append and attention by PyTorch."""
    B, HQ, HK, D = 2, 6, 2, 64
    generator = torch.Generator().manual_seed(R)
    found_in, wanted_in = (empty(torch.zeros(B, HK, 1, D, device=DEVICE), 2, bits) for _ in range(2))
    for t in range(66):
        x = torch.randn(B, 1, (HQ + 2 * HK) * D, generator=generator).to(DEVICE)
        q, k, v = (part.view(B, 1, -1, D) for part in x.split([HQ * D, HK * D, HK * D], dim=-1))
        cos, sin, *turn = (torch.randn(rows, 1, R, generator=generator).to(DEVICE) for _ in range(4))
        if t not in STEPS:
            for cache in (found_in, wanted_in):
                append(k.transpose(1, 2), v.transpose(1, 2), cache)
            continue
        call = PackedStepCall(q, k, v, found_in, 40, 4, cos=cos, sin=sin, turn_cos=turn[0], turn_sin=turn[1])
        found, lse = packed_step_triton_(call)
        rotated = [rotate(one, cos, sin) for one in (q, k)]
        wanted, wanted_lse = torch_packed_step_(
            call._replace(q=rotated[0], k=rotated[1], cache=wanted_in, cos=None, sin=None)
        )
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
        assert (lse - wanted_lse).abs().max() < 1e-4 * wanted_lse.abs().max()
    assert found_in.lengths.tolist() == [66] * B
    for name in ("keys", "values", "token_scales"):
        assert torch.equal(getattr(found_in, name), getattr(wanted_in, name)), name


@pytest.mark.parametrize("step_", [torch_packed_step_, packed_step_triton_], ids=["torch", "triton"])
@pytest.mark.parametrize(
    "paged", [pytest.param(False, id="ring", marks=pytest.mark.slow), pytest.param(True, id="pages")]
)
def test_sequences_in_rows_of_larger_tensors(step_: Any, paged: bool, poisoned_memory: None) -> None:
    """By index, with a ring of their own or with pages of two groups, they are as in tensors of their own."""
    B, HQ, HK, D = 3, 4, 2, 64
    window, groups = (None, 4) if paged else (40, 2)
    order = key_order(D) if paged else None
    wanted_in = empty(torch.zeros(B, HK, 1, D, device=DEVICE), groups, 4, order)
    wide = [torch.full((7, 2 * x[0].numel()), 77, device=DEVICE).to(x.dtype) for x in wanted_in.tensors]
    larger = empty(torch.zeros(7, HK, 1, D, device=DEVICE), 2, 4, order)
    rows_and_tensors = list(zip(wide, larger.tensors, strict=True))
    found_in = larger.with_tensors(rows[:, : x[0].numel()].view(x.shape) for rows, x in rows_and_tensors)
    state_indices = torch.tensor([5, 2, 4, 0, 0], dtype=torch.int32, device=DEVICE)
    pages = torch.tensor([[1, 6], [3, 5], [2, 4], [0, 0], [0, 0]], dtype=torch.int32, device=DEVICE)
    found_in.lengths.zero_()
    generator = torch.Generator().manual_seed(0)
    for t in range(99):
        q, k, v = (torch.randn(B + 2, 1, heads, D, generator=generator).to(DEVICE) for heads in (HQ, HK, HK))
        call = PackedStepCall(q, k, v, found_in, window, 0, state_indices=state_indices, pages=pages if paged else None)
        if t % GROUP > 1:
            torch_packed_step_(call)
            append(k[:B].transpose(1, 2), v[:B].transpose(1, 2), wanted_in)
            continue
        found, _ = step_(call)
        wanted, _ = step_(PackedStepCall(q[:B], k[:B], v[:B], wanted_in, window, 0))
        assert (found[:B] - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert found.isfinite().all()
    assert found_in.lengths[state_indices[:B].long()].tolist() == [99] * B
    assert all((rows[:, x[0].numel() :] == 77).all() for rows, x in rows_and_tensors)


def test_the_operators_are_registered_consistently() -> None:
    q, k, v = tokens(40, 64, torch.float32, 1, 2, 1)
    order = key_order(64, 1)
    cache = empty(k, 1, 4, order)
    for t in range(40):
        packed_step_(*(x[:, :, t : t + 1].transpose(1, 2) for x in (q, k, v)), cache)
    attention = PackedAttentionCall(q[:, :, -1:], cache, 64, 4, 64, edge=32)
    torch.library.opcheck(packed_attention_op.op, packed_attention_op.flat(attention))
    compiled = torch.compile(packed_attention_op, fullgraph=True, backend="aot_eager")(attention)
    assert all(map(torch.equal, compiled, packed_attention_op(attention)))
    torch.library.opcheck(launches.pack_groups_op.op, (k[:, :, :32], v[:, :, :32], 4, order))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    torch.library.opcheck(launches.round_tokens_op.op, tuple(x.clone().requires_grad_() for x in (k, v)))
    torch.library.opcheck(launches.pack_prompt_op.op, (k, v, 4, 1, None, order, None, 0))
    row = torch.tensor([0, 3, 40], device=DEVICE), 37
    torch.library.opcheck(launches.pack_prompt_op.op, (k, v, 4, 1, None, order, *row))
    torch.library.opcheck(launches.prompt_attention_op.op, (q, k, v, k, v, 20, 4, 0.2, None, 32, *row))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(
        launches.prompt_attention_op.op, (*leaves, k[:, :32], v[:, :32], 20, 4, 0.2, None, 32, None, 0)
    )
    new = [x[:, 5:8] for x in (q, k, v)]
    part = PackedPartCall(*new, cache, 1, 64, 4, 64, edge=32)
    packed = part._replace(cu_seqlens=torch.tensor([0, 3], device=DEVICE), longest=3, edge=1)
    for call in (part, packed):
        torch.library.opcheck(launches.packed_part_op.op, launches.packed_part_op.flat(call))
    step = PackedStepCall(*(x[:, :1] for x in (q, k, v)), cache, 64, 4, 64, edge=32)
    torch.library.opcheck(launches.packed_step_op_.op, launches.packed_step_op_.flat(step))


@pytest.mark.parametrize(
    ("bits", "size", "middle"),
    [
        *((bits, 1.0, 0.5) for bits in (8, 5, 4, 3)),
        *((bits, 800.0, 0.0) for bits in (8, 3)),
        *((bits, 0.02, 0.0) for bits in (8, 3)),
        (4, 1.0, 40.0),
        (5, 600.0, 300.0),
    ],
)
def test_steps_reach_small_and_large_numbers(size: float, middle: float, bits: int) -> None:
    """No number is further from a step than about half of one; a middle far from 0 makes the steps longer.

    Of 3 bits, the longest steps reach over 880.
    """
    size = min(size, 400.0) if bits == 3 else size
    x = size * (2 * torch.rand(500, GROUP, generator=torch.Generator().manual_seed(0)) - 1) + middle
    low, high = x.amin(-1), x.amax(-1)
    step = torch.maximum((high - low) / min(15, 2**bits - 1), (low + high).abs() / 63) / 2 ** max(0, bits - 4)
    error = (restored(*quantised(x, bits), bits, torch.float32) - x).abs().amax(-1)
    rounding = max(abs(low).max(), abs(high).max()) / 2**9  # of the lowest number to bfloat16
    assert (error < 0.52 * step + rounding).all()


def test_head_sizes_without_a_kernel() -> None:
    q, k, v = tokens(64, 96, torch.float32)
    with pytest.raises(NotImplementedError, match="head size 96"):
        pack_groups_triton(PackGroupsCall(k, v, 4))
    packed = pack_groups(k.cpu(), v.cpu(), 4)
    assert [tuple(x.shape[2:]) for x in packed] == [(2, 32, 48), (2, 96), (2, 96, 16), (2, 3, 32)]
    with pytest.raises(NotImplementedError, match="head size 96"):
        packed_attention_triton(PackedAttentionCall(q[:, :, -1:], empty(k, 2, 4)))
    cache = empty(k.cpu(), 2, 4)
    q, k, v = (x[:, :, :1].transpose(1, 2).cpu() for x in (q, k, v))
    out, _ = packed_step_(q, k, v, cache)
    assert torch.allclose(out, v.repeat_interleave(3, dim=2))


def test_what_is_wrong_is_named() -> None:
    q, k, v = tokens(64, 32, torch.float32)
    cache = empty(k, 2, 4)
    with pytest.raises(ValueError, match="sinks=5"):
        packed_attention(q[:, :, -1:], cache, sinks=5)
    with pytest.raises(ValueError, match="got 5 heads"):
        packed_attention(q[:, :5, -1:], cache)
    with pytest.raises(ValueError, match=r"first_q: got shape .* = \[2, 6, 1, 32\]"):
        packed_attention(q[:, :, -1:], cache, first_q=q[:, :2, -1:])
    with pytest.raises(TypeError, match="k: got dtype"):
        packed_step_(q[:, :, :1].transpose(1, 2).double(), *(x[:, :, :1].transpose(1, 2) for x in (k, v)), cache)
    with pytest.raises(ValueError, match="state_indices: got None, needs the rows of the sequences with pages"):
        packed_step_(*(x[:, :, :1].transpose(1, 2) for x in (q, k, v)), cache, pages=torch.ones(len(q), 1).int())
    with pytest.raises(ValueError, match=r"^packed_step_ has no gradients"):
        packed_step_(*(x[:, :, :1].transpose(1, 2).requires_grad_() for x in (q, k, v)), cache)
    new = [x.transpose(1, 2) for x in (q, k, v)]
    with pytest.raises(ValueError, match="sinks=5"):
        packed_part(*new, cache, 4, sinks=5)
    with pytest.raises(ValueError, match=r"k: got shape .* needs \[B, T, HK, D\] = \[2, 64, 2, 32\]"):
        packed_part(new[0], new[1][:, 1:], new[2], cache, 4)
    bounds = torch.tensor([0, 30, 64], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"q: got shape .* needs \[1, T, HQ, D\]"):
        packed_part(*new, cache, 4, cu_seqlens=bounds, longest=34)
    with pytest.raises(ValueError, match=r"cu_seqlens: got shape \[2\], needs \[N\] = \[3\]"):
        packed_part(*(x[:1] for x in new), cache, 4, cu_seqlens=bounds[1:], longest=34)
    with pytest.raises(ValueError, match="longest: got 0"):
        packed_part(*(x[:1] for x in new), cache, 4, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="groups: got -1"):
        packed_part(*new, cache, -1)
    with pytest.raises(ValueError, match=r"q: got shape .* none of them 0"):
        packed_part(*(x[:, :0] for x in new), cache, 4)
    with pytest.raises(ValueError, match=r"key_order: got one for 8 bits and D = 32, needs 4 bits"):
        pack_groups(k, v, 8, key_order(32))
    with pytest.raises(ValueError, match=r"key_order: got shape .* needs \[HK, 2, D\]"):
        packed_part(*new, cache._replace(key_order=key_order(32).mT), 4)
    with pytest.raises(ValueError, match="bits: got 3"):
        pack_groups(k, v, 3)
    with pytest.raises(ValueError, match=r"needs \[B, HK, N \* 32, D\]"):
        pack_groups(k[..., :20, :], v[..., :20, :], 4)
