"""The kinds that stay quadratic compute their formulas, with all gradients, and keep their precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.layer.parts import Opening
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind, Call, Softmax
from deltanet_hf.mixers.quadratic.path import MAX_STRENGTH
from deltanet_kernels.deltaformer.reference import naive_deltaformer_solve
from support.tiny_models import tiny_student

KINDS = [name for name, kind in MIXERS.items() if issubclass(kind, AttentionKind)]


# One layer by its formula. q, k, v [B, heads, T, D] are given, x is the layer's input.


def causal(scores: Tensor, v: Tensor) -> Tensor:
    length = scores.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def fox_formula(layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    gate = layer.forget
    f = torch.sigmoid(x @ gate.f_proj.weight.T + gate.f_proj.bias) ** gate.opening.opening
    return _decayed(f, q, k, v, scale)


def alibi_formula(layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    f = (-layer.slope.opening).exp().expand(*x.shape[:2], -1)
    return _decayed(f, q, k, v, scale)


def _decayed(f: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention times the product of f between key and query, normalised."""
    groups = q.shape[1] // k.shape[1]
    weights = (q @ k.repeat_interleave(groups, 1).mT * scale).exp()
    f = f.transpose(1, 2)
    length = f.shape[-1]
    rows = []
    for t in range(length):
        products = [f[..., s + 1 : t + 1].prod(-1) for s in range(t + 1)]
        rows.append(torch.stack(products + [torch.zeros_like(products[0])] * (length - t - 1), -1))
    weights = weights * torch.stack(rows, -2)
    return (weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(groups, 1)).transpose(1, 2)


def deltaformer_formula(layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    part, groups = layer.correction, q.shape[1] // k.shape[1]
    beta = part.opening.opening * torch.sigmoid(x @ part.b_proj.weight.T + part.b_proj.bias)
    u = naive_deltaformer_solve(k.transpose(1, 2), v.transpose(1, 2), beta, scale).transpose(1, 2)
    k, u = (part.repeat_interleave(groups, 1) for part in (k, u))
    return causal(q @ k.mT * scale, u)


def path_formula(layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    part, heads = layer.turns, k.shape[1]
    w = (x @ part.w_proj.weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)
    w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + 1e-6)
    beta = MAX_STRENGTH * torch.sigmoid(x @ part.b_proj.weight.T + part.b_proj.bias).transpose(1, 2)
    turn = torch.eye(w.shape[-1], dtype=w.dtype).expand(*w.shape[:2], -1, -1)
    queries, keys = [], []
    for t in range(w.shape[2]):
        here = w[:, :, t]
        turn = turn - beta[:, :, t, None, None] * here.unsqueeze(-1) * (here.unsqueeze(-2) @ turn)
        queries.append(torch.einsum("bhgk,bhkv->bhgv", q[:, :, t].unflatten(1, (heads, -1)), turn).flatten(1, 2))
        keys.append(torch.einsum("bhk,bhkv->bhv", k[:, :, t], turn))
    q, k = torch.stack(queries, 2), torch.stack(keys, 2)
    groups = q.shape[1] // heads
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    return causal(q @ k.mT * scale, v)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "fox": fox_formula,
    "alibi": alibi_formula,
    "deltaformer": deltaformer_formula,
    "path": path_formula,
}


def one_layer(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A layer with 4 query heads and 2 key/value heads of 8, its openings within their range."""
    layer: Any = tiny_student("llama", mixer=kind).model.layers[0].self_attn.to(dtype)
    for module in layer.modules():
        if isinstance(module, Opening):
            torch.nn.init.uniform_(module.opening, 0.2, 0.9)
    return layer


def qkv(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x [2, T, 32], q [2, 4, T, 8], k and v [2, 2, T, 8]."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, length, 32), (2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("kind", "length"), [*((kind, 19) for kind in KINDS), *((kind, 1) for kind in KINDS)])
def test_it_is_its_formula_with_all_gradients(kind: str, length: int) -> None:
    torch.manual_seed(2)
    layer = one_layer(kind)
    given = [x.requires_grad_() for x in qkv(length)]
    (part,) = layer.new_parts()
    leaves = [*given, *part.parameters()]
    pull = torch.randn(2, length, 4, 8, dtype=torch.float64)
    softmax = Softmax(layer, 0.3, 0.0, None, None)
    found = layer.attend(*given[1:], Call(given[0], None, None, None, None), softmax)
    wanted = FORMULAS[kind](layer, *given, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(o, leaves, pull, allow_unused=True) for o in (found, wanted)]
    for got, want in zip(*gradients, strict=True):
        if got is None:  # alibi does not read the layer's input
            assert want is None
            continue
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-9, atol=1e-9)


# PaTH.


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_turn_again_and_again_does_not_grow(dtype: torch.dtype) -> None:
    layer = one_layer("path", dtype)
    layer.turns.b_proj.bias.fill_(30.0)
    layer.turns.b_proj.weight.zero_()
    x, q, k, _ = qkv(1, dtype)
    x, q, k = x.expand(-1, 2000, -1), q.expand(-1, -1, 2000, -1), k.expand(-1, -1, 2000, -1)
    q_, k_, state = layer._turned(q, k, Call(x, None, None, None, None), None, True)
    assert state.abs().max() < 3
    assert k_.norm(dim=-1).max() < 1.1 * k.norm(dim=-1).max()
    assert q_.norm(dim=-1).max() < 1.1 * q.norm(dim=-1).max()


# Precision and limits of the decay.


class FixedDecay(torch.nn.Module):
    """Takes the place of a forget gate: log f [T] for every head."""

    def __init__(self, log_f: Tensor) -> None:
        super().__init__()
        self.log_f = log_f

    def forward(self, x: Tensor) -> Tensor:
        return self.log_f[: x.shape[1], None].expand(*x.shape[:2], 4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("offset", "dtype"),
    [
        (-100.0, torch.float16),
        (-800.0, torch.bfloat16),
        (-20000.0, torch.bfloat16),
        (-20000.0, torch.float16),
        (-20000.0, torch.float32),
    ],
    ids=str,
)
def test_a_large_sum_of_decays_costs_no_precision(dtype: torch.dtype, offset: float) -> None:
    """F begins at `offset`, whose spacing in bfloat16 is up to 128; the tokens behind it forget little by little."""
    length = 300
    log_f = torch.full((length,), -0.02)
    log_f[1] = offset
    layer = one_layer("fox", dtype)
    layer.forget = FixedDecay(log_f)
    x, q, k, v = qkv(length, dtype)
    found = layer.attend(q, k, v, Call(x, None, None, None, None), Softmax(layer, 0.3, 0.0, None, None))
    f = log_f.double().exp().expand(2, 4, length).transpose(1, 2)
    wanted = _decayed_by_sums(f, q.double(), k.double(), v.double())
    rounding = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    spacing = -offset * 2.0**-23  # of F in float32
    assert (found.double() - wanted).norm() / wanted.norm() < rounding + spacing


def _decayed_by_sums(f: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    total = f.log().nan_to_num(neginf=-1e9).cumsum(1).transpose(1, 2)
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    return causal(q @ k.mT * 0.3 + total.unsqueeze(-1) - total.unsqueeze(-2), v)


@torch.no_grad()
def test_a_shut_gate_leaves_the_own_value() -> None:
    layer = one_layer("fox", torch.float32)
    layer.forget = FixedDecay(torch.full((50,), -1e4))
    x, q, k, v = qkv(50, torch.float32)
    found = layer.attend(q, k, v, Call(x, None, None, None, None), Softmax(layer, 0.3, 0.0, None, None))
    torch.testing.assert_close(found.transpose(1, 2), v.repeat_interleave(2, 1))


def test_an_opening_outside_of_its_range_counts_as_its_end_and_can_return() -> None:
    opening = Opening(4, limit=1.0)
    with torch.no_grad():
        opening.opening.copy_(torch.tensor([-0.3, 0.0, 0.7, 1.5]))
    value = opening()
    assert value.tolist() == [0.0, 0.0, pytest.approx(0.7), 1.0]
    value.sum().backward()
    assert opening.opening.grad.tolist() == [1.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_rows_of_2048_tokens_train_in_bfloat16(kind: str) -> None:
    """Outputs and gradients against float64, relative to what the rounded inputs allow."""
    exact = one_layer(kind)
    layer = one_layer(kind).cuda()
    layer.load_state_dict(exact.state_dict())
    given = [x.requires_grad_() for x in qkv(2048)]
    pull = torch.randn(2, 2048, 4, 8, dtype=torch.float64)
    wanted = exact.attend(*given[1:], Call(given[0], None, None, None, None), Softmax(exact, 0.3, 0.0, None, None))
    gradients = torch.autograd.grad(wanted, given[1:], pull)
    narrow = [x.detach().cuda().bfloat16().requires_grad_() for x in given]
    layer = layer.bfloat16()
    found = layer.attend(*narrow[1:], Call(narrow[0], None, None, None, None), Softmax(layer, 0.3, 0.0, None, None))
    # The formulas in bfloat16 on a CPU lose 0.004 of the outputs and 0.008 of the gradients.
    assert (found.double().cpu() - wanted).norm() / wanted.norm() < 0.02
    for got, want in zip(torch.autograd.grad(found, narrow[1:], pull.cuda().bfloat16()), gradients, strict=True):
        assert (got.double().cpu() - want).norm() / want.norm() < 0.02
