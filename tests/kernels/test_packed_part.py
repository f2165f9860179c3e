"""Several tokens after those of a packed cache, against float64 and the cache of a whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_kernels import PackedKeyValues, pack_prompt, packed_part
from deltanet_kernels.packed_cache import arranged
from deltanet_kernels.packed_cache.calls import EVERYTHING
from deltanet_kernels.packed_cache.layout import GROUP
from deltanet_kernels.packed_cache.reference import append
from tests.kernels.packed_cases import definition, empty, key_order, tokens
from tests.kernels.test_decode_attention import bfloat16_products  # noqa: F401  a fixture
from tests.kernels.triton_mode import DEVICE, by_pytorch, by_triton

pytestmark = pytest.mark.usefixtures("rounding_to_nearest", "bfloat16_products")
FORMS = {"torch": by_pytorch, "triton": by_triton}

COUNTS = (1, 100, 31, 0, 33, 32)  # tokens before a part, of a row each
REACHES = [  # window, sinks, limit, cap, bits, with a key order
    (None, 0, None, None, 4, True),
    (40, 4, None, 3.0, 8, False),
    (9, 0, None, None, 4, False),
    (300, 2, None, None, 8, False),
    (33, 3, 90, None, 4, True),
    (1, 4, None, None, 8, False),
]


def cached(k: Tensor, v: Tensor, bits: int, groups: int, order: Tensor | None = None) -> PackedKeyValues:
    """The cache of the first `COUNTS` tokens of each row of k, v [B, T, HK, D]."""
    rows = []
    for row, count in enumerate(COUNTS):
        prompt = count - 1 if count == 33 else count  # then a step, which leaves the group before it in its places
        k_row, v_row = k[row, None, :count], v[row, None, :count]
        made = empty(k[:1].transpose(1, 2), groups, bits, order)
        if prompt:
            made, *_ = by_pytorch(pack_prompt)(k_row[:, :prompt], v_row[:, :prompt], bits, groups, None, order)
        if prompt < count:
            append(k_row[:, prompt:].transpose(1, 2), v_row[:, prompt:].transpose(1, 2), made)
        rows.append(made)
    return PackedKeyValues.joined(rows)


def parts_of(x: Tensor, cuts: list[int]) -> list[Tensor]:
    """The tokens of x [B, T, H, D] behind the first of each row, in parts."""
    T = sum(cuts)
    rows = [x[row, count : count + T] for row, count in enumerate(COUNTS)]
    return list(torch.stack(rows).split(cuts, dim=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("cuts", "reach"),
    [
        *(([2, 31, 32, 33], REACHES[place]) for place in (0, 4)),
        *(pytest.param([2, 31, 32, 33], REACHES[place], marks=pytest.mark.slow) for place in (1, 2, 3, 5)),
        *(([T], REACHES[0]) for T in (2, 33)),
        *(([T], REACHES[1]) for T in (31, 32)),
        *(pytest.param([200], REACHES[place], marks=pytest.mark.slow) for place in (0, 1, 4)),
        pytest.param([33, 32, 63], REACHES[4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_after_a_cache_are_the_whole(
    form: str, cuts: list[int], reach: tuple[Any, ...], poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different numbers of tokens, against float64; the cache is, byte for byte, that of a whole prompt."""
    window, sinks, limit, cap, bits, ordered = reach
    dtype, rounding = (torch.float64, 1e-13) if form == "torch" else (torch.float32, 5e-6)
    D = 128 if sum(cuts) == 31 and window == 40 else 64
    monkeypatch.setattr(arranged, "QUERIES", 20)
    T, B = sum(cuts), len(COUNTS)
    q, k, v = (x.transpose(1, 2) for x in tokens(100 + T, D, dtype, B, 4, 2))
    ring = None if window is None else -(-(window - 1) // GROUP)
    order = key_order(D) if ordered else None
    cache = cached(k, v, bits, 3 if ring is None else ring, order)
    before = [x.clone() for x in cache.tensors]
    outputs, sums, seen = [], [], 100
    for part in zip(*(parts_of(x, cuts) for x in (q, k, v)), strict=True):
        seen += part[0].shape[1]
        groups = (seen - 1) // GROUP if ring is None else ring
        call = *part, cache, groups, window, sinks, limit, 0.2, cap
        o, lse, new, *_ = FORMS[form](packed_part)(*call)
        assert all(torch.equal(one, other) for one, other in zip(cache.tensors, before, strict=True))
        cache, before = new, [x.clone() for x in new.tensors]
        outputs.append(o)
        sums.append(lse)
    out, lse = torch.cat(outputs, dim=1), torch.cat(sums, dim=1)
    for row, count in enumerate(COUNTS):
        own = [x[row, None, : count + T] for x in (q, k, v)]
        whole, *_ = by_pytorch(pack_prompt)(*own[1:], bits, cache.groups, None, order)
        for name, one, other in zip(cache._fields, cache.tensors, whole.tensors, strict=False):
            assert torch.equal(one[row : row + 1], other), (count, name)
        for end in (*range(count // GROUP * GROUP + GROUP, count + T, GROUP), count + T):
            start = max(count, (end - 1) // GROUP * GROUP)
            till = [x[:, :end].transpose(1, 2) for x in own]
            reached = window or EVERYTHING, sinks, limit or EVERYTHING
            wanted, wanted_lse = definition(*till, bits, *reached, cap, end - start, order)
            at = slice(start - count, end - count)
            error = (out[row, at].double() - wanted[0].transpose(0, 1)).abs().max()
            assert error < rounding * (1 + wanted.abs().max()), (count, end)
            error = (lse[row, at].double() - wanted_lse[0].view(4, -1).mT).abs().max()
            assert error < 5 * rounding, (count, end)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("reach", "begins"), [(reach, place in (1, 2, 4)) for place, reach in enumerate(REACHES)])
def test_sequences_in_one_row(form: str, reach: tuple[Any, ...], begins: bool, poisoned_memory: None) -> None:
    """Of different lengths, and one of none, as each alone; tokens behind the last sequence belong to none."""
    window, sinks, limit, cap, bits, ordered = reach
    lengths = (2, 29, 65, 1, 40, 0 if form == "triton" else 3)  # the rows' restored groups touch
    q, k, v = (x.transpose(1, 2) for x in tokens(165, 64, torch.float32, len(COUNTS), 4, 2))
    ring = None if window is None else -(-(window - 1) // GROUP)
    held, groups = (3, 6) if ring is None else (ring, ring)
    order = key_order(64) if ordered else None
    cache = empty(k.transpose(1, 2), held, bits, order) if begins else cached(k, v, bits, held, order)
    new = [[x[row, None, 100 : 100 + length] for row, length in enumerate(lengths)] for x in (q, k, v)]
    joint = [torch.cat([*rows, rows[0]], dim=1) for rows in new]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    if form == "torch":
        joint = [x[:, :-2] for x in joint]
    rest = window, sinks, limit, 0.2, cap
    call = *joint, cache, groups, *rest, bounds, max(lengths)
    out, lse, found, *_ = FORMS[form](packed_part)(*call)
    for row, (own, bound) in enumerate(zip(zip(*new, strict=True), bounds.tolist(), strict=False)):
        one = cache.with_tensors(x[row : row + 1] for x in cache.tensors)
        if not lengths[row]:
            assert torch.equal(found.keys[row], one.keys[0])
            assert torch.equal(found.values[row], one.values[0])
            assert found.lengths[row] == one.lengths[0]
            continue
        wanted, wanted_lse, after, *_ = by_pytorch(packed_part)(*own, one, groups, *rest)
        at = slice(bound, bound + lengths[row])
        assert (out[:, at] - wanted).abs().max() < 5e-6 * (1 + wanted.abs().max()), row
        assert (lse[:, at] - wanted_lse).abs().max() < 2.5e-5, row
        for name, x, other in zip(found._fields, found.tensors, after.tensors, strict=False):
            assert torch.equal(x[row : row + 1], other), (row, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("order", "dtype"), [(None, torch.float16), (key_order(64), torch.bfloat16)], ids=["", "ordered"]
)
def test_a_part_in_sixteen_bits(form: str, order: Tensor | None, dtype: torch.dtype, poisoned_memory: None) -> None:
    """Of strided inputs, as a projection makes them, after a cache that is a part of larger tensors."""
    q, k, v = tokens(140, 64, dtype, len(COUNTS), 4, 2)
    cache = cached(k.transpose(1, 2), v.transpose(1, 2), 4, 5, order)
    cache = cache._replace(**{name: getattr(cache, name)[:, :, :3] for name in cache._fields[:4]})
    joint = torch.cat([parts_of(x.transpose(1, 2), [40])[0] for x in (q, k, v)], dim=2)
    call = *joint.split([4, 2, 2], dim=2), cache, 4, 70, 4, None, 0.2
    out, _, new, *_ = FORMS[form](packed_part)(*call)
    assert out.dtype == dtype
    for row, count in enumerate(COUNTS):
        own = [x[row, None, :, : count + 40] for x in (q, k, v)]
        whole, *_ = by_pytorch(pack_prompt)(*(x.transpose(1, 2) for x in own[1:]), 4, 4, None, order)
        for name, one, other in zip(new._fields, new.tensors, whole.tensors, strict=False):
            assert torch.equal(one[row : row + 1], other), (count, name)
        wanted, _ = definition(*own, 4, 70, 4, EVERYTHING, None, order=order)
        assert (out[row, -1].double() - wanted[0, :, 0]).norm() < torch.finfo(dtype).eps * wanted.norm()
