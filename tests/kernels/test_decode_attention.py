"""Attention of one query to a cache, split over its places: the same as over all of them at once, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.runtime import interpreter

from deltanet_kernels import decode_attention
from deltanet_kernels.flash_decoding import attention, config
from deltanet_kernels.flash_decoding.attention import decode_attention_op
from deltanet_kernels.flash_decoding.config import cut_places
from support.refusals import assert_refused
from tests.kernels.triton_mode import DEVICE, by_pytorch, triton_decode_attention

pytestmark = pytest.mark.usefixtures("rounding_to_nearest", "bfloat16_products")
torch_attention = by_pytorch(decode_attention)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
SHAPES = [  # B, HQ, HK, S, D
    (1, 1, 1, 1, 16),
    (3, 3, 3, 5, 8),
    (2, 9, 3, 300, 64),
    (1, 4, 1, 1000, 100),
    (2, 8, 1, 300, 128),
    (1, 34, 2, 70, 32),
    (1, 8, 2, 130, 256),
    (1, 2, 2, 257, 1),
]

LONG = [((2, 2), 16), ((9, 3), 64), ((32, 1), 80), ((4, 1), 96), ((6, 2), 100), ((32, 8), 128), ((8, 1), 256)]


def holes(mask: Tensor) -> None:
    """Half of the places, at random."""
    mask.copy_(torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.5)


def one(mask: Tensor) -> None:
    """One place per row: of the first, the middle and the last, in turn."""
    mask.fill_(False)
    size = mask.shape[3]
    for row, at in enumerate((0, size // 2, size - 1)[: len(mask)]):
        mask[row, ..., at] = True


def nothing(mask: Tensor) -> None:
    """The last row sees nothing; the others see all but the first places and the last third."""
    mask.fill_(True)
    mask[..., :2] = mask[..., mask.shape[3] - mask.shape[3] // 3 :] = False
    mask[-1] = False


MASKS: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda mask: mask.fill_(True), "holes": holes, "one": one, "nothing": nothing,
}  # fmt: skip


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as integers; GPUs multiply the numbers."""
    product = interpreter.InterpreterBuilder.create_dot

    def of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return product(self, a, b, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", of_numbers)


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of places is a span."""
    monkeypatch.setattr(config, "LEAST_SPAN", 1)
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 1000)


def make(shape: tuple[int, ...], mask: str = "all", dtype: torch.dtype = torch.float32) -> Inputs:
    B, HQ, HK, S, D = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(size, generator=generator) for size in ((B, HQ, 1, D), (B, HK, S, D), (B, HK, S, D)))
    seen = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    MASKS[mask](seen)
    return (2 * q).to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype), seen.to(DEVICE)


def truth(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """The definition in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def check(found: Tensor, wanted: Tensor, scores: float = 0.0) -> None:
    """Float32 sums, rounded once; a weight is as wrong as its score, whose summands are at most `scores` together."""
    rounding = 0.0 if found.dtype == torch.float32 else 0.501 * torch.finfo(found.dtype).eps
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    error = (found.double() - wanted).abs()
    bound = 4e-6 + 2 * torch.finfo(torch.float32).eps * scores
    assert (error <= rounding * wanted.abs() + bound).all(), error.max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_mask(shape: tuple[int, ...], short_spans: None, poisoned_memory: None) -> None:
    masks = list(MASKS) if shape[3] * shape[4] < 20_000 else ["holes", "nothing"]
    for mask in masks:
        inputs = make(shape, mask)
        wanted = truth(*inputs)
        check(torch_attention(*inputs, None), wanted)
        found = triton_decode_attention(*inputs, None)
        check(found, wanted)
        assert mask != "nothing" or not found[-1].any()


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4]], ids=str)
def test_one_span_is_one_launch(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setattr(config, "LEAST_SPAN", 512)
    monkeypatch.setattr(attention, "combine_kernel", None)
    for mask in MASKS:
        inputs = make(shape, mask)
        q, k = inputs[0].float().abs(), inputs[1].float().abs()
        scores = 0.3 * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT).max().item()
        check(triton_decode_attention(*inputs, 0.3), truth(*inputs, 0.3), scores)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPES[0], torch.bfloat16),
        (SHAPES[2], torch.float16),
        ((1, 4, 1, 130, 100), torch.float16),
        ((1, 2, 1, 70, 256), torch.bfloat16),
    ],
    ids=str,
)
def test_sixteen_bits_are_rounded_once(
    shape: tuple[int, ...], dtype: torch.dtype, short_spans: None, poisoned_memory: None
) -> None:
    inputs = make(shape, "holes", dtype)
    found = triton_decode_attention(*inputs, None)
    assert found.dtype == dtype
    check(found, truth(*inputs))


def wide(x: Tensor) -> Tensor:
    """Places and channels within larger ones, at an odd address."""
    B, H, S, D = x.shape
    room = torch.full((B, H + 1, S + 3, D + 5), torch.nan, dtype=x.dtype, device=x.device)
    room[:, 1:, 2 : S + 2, 3 : D + 3] = x
    return room[:, 1:, 2 : S + 2, 3 : D + 3]


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "within larger ones": wide,
    "one for all rows": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", IN_PLACE)
def test_layouts_are_read_in_place(layout: str, short_spans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, mask = make((2, 6, 2, 140, 24), "holes")
    apart = [IN_PLACE[layout](x) for x in (q, k, v)]
    wanted = truth(apart[0], apart[1], apart[2], mask)
    dense = Tensor.contiguous

    def checked(x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return dense(x)

    monkeypatch.setattr(Tensor, "contiguous", checked)
    check(triton_decode_attention(apart[0], apart[1], apart[2], mask, None), wanted)


def test_channels_and_masks_that_are_apart(short_spans: None) -> None:
    q, k, v, mask = make((2, 6, 2, 70, 24), "holes")
    sparse = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in (q, k, v, mask)]
    wanted = truth(q, k, v, mask)
    check(triton_decode_attention(sparse[0], sparse[1], sparse[2], sparse[3], None), wanted)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # overflows in the interpreter
def test_scores_at_the_ends_of_the_range(short_spans: None) -> None:
    q, k, v, mask = make((2, 4, 2, 140, 16), "holes")
    q, k = q.round(), k.round()  # whole numbers: their products are exact
    for factor in (0.0, 2.0**-60, 2.0**12, 2.0**58):
        check(triton_decode_attention(q * factor, k * factor, v, mask, 1.0), truth(q * factor, k * factor, v, mask, 1))
    low = torch.full_like(k, -(2.0**122))  # every score is close to the lowest float32
    check(triton_decode_attention(q.abs(), low, v, mask, 1.0), truth(q * 0, low, v, mask))


def test_what_is_undefined_stays_visible(short_spans: None) -> None:
    q, k, v, mask = make((2, 2, 1, 140, 16))
    k[0, 0, 77, 3] = torch.nan
    found = triton_decode_attention(q, k, v, mask, None)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_spans_fill_the_chip() -> None:
    for S, pairs, tile in ((36864, 8, 64), (18432, 128, 64), (36864, 3, 128), (2304, 8, 64), (4096, 64, 32)):
        span, spans = cut_places(S, pairs, 132, tile)
        assert span % tile == 0
        assert (spans - 1) * span < S <= spans * span
        assert span >= config.LEAST_SPAN
        assert spans * pairs >= 2 * 132 or span == config.LEAST_SPAN
    assert cut_places(40, 1, 132, 128) == (256, 1)
    assert cut_places(10**6, 10**4, 132, 64)[1] == 1


def test_the_operator_is_registered_consistently() -> None:
    torch.library.opcheck(decode_attention_op.op, (*make((2, 4, 2, 40, 16), "holes"), 0.25))


def test_under_the_compiler(short_spans: None) -> None:
    inputs = make((2, 4, 2, 140, 16), "nothing")
    with torch.no_grad():
        compiled = torch.compile(triton_decode_attention, backend="aot_eager", fullgraph=True)(*inputs, None)
    check(compiled, truth(*inputs))


X = torch.zeros(2, 2, 5, 16)
GOOD: dict[str, Any] = {
    "q": torch.zeros(2, 4, 1, 16), "k": X, "v": X, "mask": torch.ones(2, 1, 1, 5, dtype=torch.bool),
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": torch.zeros(2, 4, 2, 16)}, ValueError, r"q: got shape \[2, 4, 2, 16\], needs \[B, HQ, 1, D\]"),
    ({"q": torch.zeros(2, 3, 1, 16)}, ValueError, "q: got 3 heads, needs a multiple of the 2 heads of k"),
    ({"k": X[:1]}, ValueError, r"k: got shape \[1, 2, 5, 16\], needs \[B, HK, S, D\] = \[2, HK, S, 16\]"),
    ({"v": X[..., :8]}, ValueError, r"v: got shape \[2, 2, 5, 8\], needs .* = \[2, 2, 5, 16\]"),
    ({"v": X.half()}, TypeError, "v: got dtype torch.float16, needs torch.float32"),
    ({"mask": torch.zeros(2, 1, 1, 5)}, TypeError, r"mask: got dtype torch.float32, needs torch.bool"),
    ({"mask": torch.ones(2, 1, 1, 4, dtype=torch.bool)}, ValueError, r"mask: got shape \[2, 1, 1, 4\]"),
    ({"mask": torch.ones(2, 4, 1, 5, dtype=torch.bool)}, ValueError, r"needs \[B, 1, 1, S\] = \[2, 1, 1, 5\]"),
    ({"k": X.clone().requires_grad_()}, ValueError, "decode_attention has no gradients"),
]


def test_what_is_wrong_is_named() -> None:
    assert_refused(decode_attention, [(GOOD | changes, *refusal) for changes, *refusal in WRONG])


def test_what_the_kernels_do_not_take() -> None:
    for shape, dtype, message in (
        ((1, 1, 1, 3, 16), torch.float64, "float64"),
        ((1, 1, 1, 3, 260), torch.float32, "head sizes 260"),
        ((1, 33, 1, 3, 16), torch.float32, "33 query heads per key head"),
    ):
        inputs = tuple(x.cpu() for x in make(shape, "all", dtype))
        with pytest.raises(NotImplementedError, match=message):
            triton_decode_attention(*inputs, None)
        torch.testing.assert_close(decode_attention(*inputs).double(), truth(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "D"), LONG, ids=str)
def test_long_caches_under_a_graph(heads: tuple[int, int], D: int, dtype: torch.dtype) -> None:
    """Every replay gives the same bits, follows the mask as it is then, and equals SDPA."""
    q, k, v, mask = make((3, *heads, 5000, D), "nothing", dtype)
    decode_attention(q, k, v, mask)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_attention(q, k, v, mask)
    for kind in MASKS:
        mask.copy_(make((3, 1, 1, 5000, 1), kind)[3])
        graph.replay()
        first = o.clone()
        for _ in range(20):
            graph.replay()
            assert torch.equal(o, first)
        check(first, truth(q, k, v, mask))
        group = heads[0] // heads[1]
        repeated = (x.repeat_interleave(group, dim=1) for x in (k, v))
        seeing = mask[:, 0, 0].any(1)
        sdpa = F.scaled_dot_product_attention(q, *repeated, mask)[seeing]
        bound = max(2 * torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(first[seeing], sdpa, rtol=bound, atol=bound)


@pytest.mark.gpu
def test_places_further_apart_than_32_bits_count() -> None:
    q, k, v, mask = make((1, 2, 1, 3, 64), dtype=torch.bfloat16)
    room = torch.empty(2 * 2**30 + 64, dtype=torch.bfloat16, device=DEVICE)
    far = room.as_strided(k.shape, (2**31, 2**31, 2**30, 1)).copy_(k)
    check(decode_attention(q, far, v, mask), truth(q, k, v, mask))
    assert torch.equal(decode_attention(q, k, far.copy_(v), mask), decode_attention(q, k, v, mask))
