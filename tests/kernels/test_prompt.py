"""The elementwise work of a prompt: each operator and its kernel against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import gate_values, prompt_inputs
from deltanet_kernels.prompt.calls import PromptInputs, PromptInputsCall
from deltanet_kernels.prompt.cpu import torch_prompt_inputs
from deltanet_kernels.prompt.gates import gate_values_op
from deltanet_kernels.prompt.inputs import prompt_inputs_op, prompt_inputs_triton
from support.refusals import assert_refused
from tests.kernels.cases import relative_error
from tests.kernels.test_step import rotate
from tests.kernels.triton_mode import DEVICE, GPU, triton_gates


@dataclass(frozen=True)
class Prompt:
    """One call of `prompt_inputs`."""

    name: str
    T: int = 9
    B: int = 1
    heads: tuple[int, int, int] = (2, 1, 1)
    D: int = 16
    taps: int = 4  # 0 for no convolution
    tail: bool = True
    rope: int = 16  # channels that turn
    positions: int = 1  # rows of cos and sin
    offsets: int = 0  # rows of the keys' offset
    qk_silu: bool = False
    v_silu: bool = False
    window_heads: int = 1
    repeats: int = 1  # of the heads of k and v

    def __str__(self) -> str:
        return self.name


CASES = [
    Prompt("beside a window", B=2),
    Prompt(
        "everything", B=2, heads=(4, 2, 2), rope=12, positions=2, offsets=2, qk_silu=True, v_silu=True, window_heads=2
    ),
    Prompt("from the first token", tail=False, B=2),
    Prompt("fewer tokens than taps", T=2),
    Prompt("one token", T=1, tail=False, taps=3),
    Prompt("two taps", taps=2, offsets=1),
    Prompt("no convolution", taps=0, heads=(2, 2, 1), offsets=2, v_silu=True),
    Prompt("no convolution, v as it is", taps=0, qk_silu=True),
    Prompt("no rotation", rope=0, window_heads=0, qk_silu=True),
    Prompt("no rotation, odd heads", rope=0, D=7, heads=(1, 1, 1)),
    Prompt("partly rotated odd heads", B=2, rope=6, D=21, heads=(2, 2, 2), window_heads=2, positions=2),
    Prompt("several writes", heads=(2, 4, 4), offsets=2, window_heads=2),
    Prompt("9 and 3 heads, two tiles", T=66, heads=(9, 3, 3), D=64, rope=64, window_heads=3),
    Prompt("heads of 128, two tiles", T=33, heads=(1, 1, 1), D=128, rope=128),
    Prompt("heads of 100, a whole tile", T=32, D=100, rope=50),
    Prompt("heads of 1", D=1, rope=0),
    Prompt("repeated heads", B=2, heads=(6, 2, 2), repeats=3, offsets=6, window_heads=2),
    Prompt("repeated heads as they are", repeats=2, taps=0, rope=0, window_heads=0),
    Prompt("repeated writes", heads=(4, 4, 4), repeats=2, offsets=4, qk_silu=True, v_silu=True, window_heads=2),
]
TENSORS = ("q", "k", "v", "conv_weight", "conv_tail", "cos", "sin", "k_offset")


def make(case: Prompt, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    B, T, D = case.B, case.T, case.D
    C = (case.heads[0] + case.repeats * sum(case.heads[1:])) * D
    x: dict[str, Any] = {name: randn(B, T, heads * D) for name, heads in zip(("q", "k", "v"), case.heads, strict=True)}
    angle = 3 * torch.randn(case.positions, T, case.rope // 2, generator=generator).repeat(1, 1, 2)
    x |= {
        "head_dim": D,
        "conv_weight": randn(C, case.taps) if case.taps else None,
        "conv_tail": randn(B, C, case.taps - 1) if case.taps and case.tail else None,
        "cos": angle.cos().to(DEVICE, dtype) if case.rope else None,
        "sin": angle.sin().to(DEVICE, dtype) if case.rope else None,
        "k_offset": randn(case.offsets, D) if case.offsets else None,
        "qk_silu": case.qk_silu,
        "v_silu": case.v_silu,
        "window_heads": case.window_heads,
        "output_tail": case.taps > 0,
        "kv_repeats": case.repeats,
    }
    return x


def truth(x: dict[str, Any]) -> PromptInputs:
    """The definition in float64, token by token."""
    y = {name: None if x[name] is None else x[name].cpu().double() for name in TENSORS}

    def split(z: Tensor) -> Tensor:
        return z.unflatten(-1, (-1, x["head_dim"]))

    def turned(z: Tensor) -> Tensor:
        return z if y["cos"] is None else rotate(z, y["cos"], y["sin"])

    repeated = [split(y[name]).repeat_interleave(x["kv_repeats"], dim=2).flatten(2) for name in ("k", "v")]
    inputs = torch.cat([y["q"], *repeated], dim=-1)
    sizes = [y["q"].shape[-1], *(part.shape[-1] for part in repeated)]
    weight, tail, found = y["conv_weight"], None, inputs.clone()
    if weight is not None:
        size = weight.shape[1] - 1
        past = y["conv_tail"].mT if y["conv_tail"] is not None else inputs.new_zeros(len(inputs), size, sum(sizes))
        longer = torch.cat([past, inputs], dim=1)
        for t in range(inputs.shape[1]):
            found[:, t] = (longer[:, t : t + size + 1] * weight.mT).sum(1)
        tail = longer[:, inputs.shape[1] :].mT

    q, k, v = (split(part) for part in found.split(sizes, dim=-1))
    q, k = turned(q), turned(k)
    if y["k_offset"] is not None:
        k = k - y["k_offset"].repeat(k.shape[2] // len(y["k_offset"]), 1)
    q, k = (F.silu(q), F.silu(k)) if x["qk_silu"] else (q, k)
    window = (turned(split(y["q"])), turned(split(y["k"]))[:, :, -x["window_heads"] :])
    v = F.silu(v) if x["v_silu"] else v
    return PromptInputs(q, k, v, *(window if x["window_heads"] else (None, None)), tail)


def triton_inputs(**x: Any) -> PromptInputs:
    return prompt_inputs_triton(PromptInputsCall(**x))


SIDES = [pytest.param(prompt_inputs, id="public"), pytest.param(triton_inputs, id="triton")]


def check(found: PromptInputs, wanted: PromptInputs, tolerance: float) -> None:
    for name in PromptInputs._fields:
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.shape == other.shape, name
            assert relative_error(one, other) < tolerance, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inputs_of_a_prompt(case: Prompt, poisoned_memory: None) -> None:
    x = make(case)
    wanted = truth(x)
    for compute in (prompt_inputs, triton_inputs):
        check(compute(**x), wanted, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=str)
def test_sixteen_bits_are_rounded_once(case: Prompt, dtype: torch.dtype) -> None:
    """No result is further from the definition than that of the separate operations."""
    x = make(case, dtype)
    wanted, separate, found = truth(x), torch_prompt_inputs(PromptInputsCall(**x)), triton_inputs(**x)
    for name in ("q", "k", "v", "window_q", "window_k"):
        one, other = getattr(found, name), getattr(separate, name)
        assert one.dtype == dtype
        # Triton's interpreter cuts off where it makes bfloat16, which is twice the error of rounding to nearest.
        allowance = 1.0 if GPU or dtype == torch.float16 else 2.0
        assert relative_error(one, getattr(wanted, name)) <= 1.01 * allowance * max(
            relative_error(other, getattr(wanted, name)), torch.finfo(dtype).eps / 4
        ), name
    assert torch.equal(found.tail, separate.tail)


@pytest.mark.parametrize("compute", SIDES)
def test_in_parts_as_in_one(compute: Callable[..., PromptInputs]) -> None:
    x = make(Prompt("parts", T=24, D=128, rope=128, heads=(1, 1, 1)))
    whole, tail, first = compute(**x), x["conv_tail"], 0
    for length in (17, 1, 2, 4):
        part = {name: x[name][:, first : first + length] for name in ("q", "k", "v", "cos", "sin")}
        found = compute(**x | part | {"conv_tail": tail})
        for name in ("q", "k", "v", "window_q", "window_k"):
            one = getattr(whole, name)[:, first : first + length]
            torch.testing.assert_close(getattr(found, name), one, rtol=1e-6, atol=1e-6)
        tail, first = found.tail, first + length
    assert torch.equal(tail, whole.tail)


@pytest.mark.parametrize("compute", SIDES)
def test_projections_may_be_slices_of_one_tensor(compute: Callable[..., PromptInputs]) -> None:
    x = make(CASES[1])
    joint = torch.cat([x["q"], x["k"], x["v"], torch.full_like(x["q"], torch.nan)], dim=-1)
    sizes = [x[name].shape[-1] for name in ("q", "k", "v", "q")]
    parts = dict(zip(("q", "k", "v"), joint.split(sizes, dim=-1), strict=False))
    check(compute(**x | parts), truth(x), 1e-6)


def test_a_huge_input_stays_in_its_channel_and_its_tokens() -> None:
    x = make(Prompt("huge", rope=0, heads=(1, 1, 1)))
    x["q"][0, 4, 3] = torch.inf
    found = triton_inputs(**x).q
    bad = ~found.isfinite()
    assert bad[0, 4:8, 0, 3].all()
    assert bad.sum() == 4


def test_the_operators_are_registered_consistently() -> None:
    case = Prompt("small", T=2, B=1, heads=(1, 1, 1), D=4, rope=4, offsets=1, v_silu=True)
    torch.library.opcheck(prompt_inputs_op.op, PromptInputsCall(**make(case)))
    a, slope = torch.randn(2, 3, 4, device=DEVICE), torch.randn(4, device=DEVICE)
    torch.library.opcheck(gate_values_op.op, (a, a + 1, slope, slope, 2))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 0}, "head_dim: got 0, needs at least 1"),
    ({"head_dim": 5}, r"q: got shape \[2, 9, 32\], needs \[B, T, heads \* 5\]"),
    ({"k": torch.zeros(2, 8, 16)}, "k: got shape"),
    ({"v": torch.zeros(2, 9, 16).half()}, "v: got dtype torch.float16, needs torch.float32"),
    ({"conv_weight": torch.zeros(63, 4)}, r"conv_weight: got shape \[63, 4\], needs \[C, W\] = \[64, W\]"),
    ({"conv_weight": None}, "conv_weight: got None, needs the taps"),
    ({"conv_tail": torch.zeros(2, 64, 2)}, r"conv_tail: got shape \[2, 64, 2\], needs \[B, C, W-1\]"),
    ({"sin": None}, "sin: needs a tensor with cos"),
    ({"k_offset": torch.zeros(2, 16)}, "k_offset: got 2 heads, needs a divisor of the 1 heads of k"),
    ({"k_offset": torch.zeros(1, 16).int()}, "k_offset: got dtype torch.int32"),
    ({"conv_weight": torch.zeros(64, 4).requires_grad_()}, "prompt_inputs has no gradients"),
    (
        {"window_heads": 2, "kv_repeats": 2, "conv_weight": None, "conv_tail": None, "output_tail": False},
        "window_heads: got 2, needs at most 1, the heads of k",
    ),
    ({"kv_repeats": 0}, "kv_repeats: got 0, needs at least 1"),
    ({"kv_repeats": 1.0}, "kv_repeats: got float, needs int"),
    ({"kv_repeats": 2}, r"conv_weight: got shape \[64, 4\], needs \[C, W\] = \[96, W\]"),
]


def test_bad_arguments() -> None:
    x = {name: y.cpu() if isinstance(y, Tensor) else y for name, y in make(CASES[0]).items()}
    assert_refused(prompt_inputs, [(x | changes, (TypeError, ValueError), message) for changes, message in WRONG])


@pytest.mark.parametrize("compute", [gate_values, triton_gates])
@pytest.mark.parametrize(("shape", "limit"), [((2, 5, 3), 1), ((1, 200, 9), 2), ((1, 1, 1), 1)])
def test_gates(compute: Callable[..., tuple[Tensor, Tensor]], shape: tuple[int, int, int], limit: int) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (4 * torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
    A_log, dt_bias = (torch.randn(shape[2], generator=generator).to(DEVICE) for _ in range(2))
    joint = torch.cat([a, b], dim=-1)
    g, beta = compute(joint[..., : shape[2]], joint[..., shape[2] :], A_log, dt_bias, limit)
    wanted = -A_log.double().exp() * F.softplus(a.double() + dt_bias.double(), threshold=100)
    torch.testing.assert_close(g.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(beta.double(), limit * b.double().sigmoid(), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("compute", [gate_values, triton_gates])
def test_gates_at_their_ends(compute: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Closed ones are exactly 0; very slow decays keep their digits."""
    logits = torch.tensor([-1e4, -80.0, -30.0, -10.0, 0.0, 30.0, 1e4], device=DEVICE).view(1, -1, 1)
    zero = torch.zeros(1, device=DEVICE)
    g, beta = compute(logits, logits, zero, zero, 2)
    assert g[0, 0, 0] == 0
    assert beta.flatten()[[0, -1]].tolist() == [0.0, 2.0]
    wanted = -torch.log1p(logits.double().exp()).where(logits < 100, logits.double())
    torch.testing.assert_close(g.double()[:, 1:], wanted[:, 1:], rtol=1e-5, atol=0)


WRONG_GATES: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.zeros(2, 3)}, "a: got shape"),
    ({"b": torch.zeros(2, 3, 5)}, "b: got shape"),
    ({"A_log": torch.zeros(3)}, r"A_log: got shape \[3\], needs \[H\]"),
    ({"dt_bias": None}, "dt_bias: got NoneType"),
    ({"A_log": torch.zeros(4).requires_grad_()}, "gate_values has no gradients"),
    *(({"limit": limit}, f"limit: got {limit}, needs 1 or 2") for limit in (0, 3)),
]


def test_bad_arguments_of_gates() -> None:
    x = {"a": torch.zeros(2, 3, 4), "b": torch.zeros(2, 3, 4), "A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    assert_refused(gate_values, [(x | changes, (TypeError, ValueError), message) for changes, message in WRONG_GATES])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_without_copies(case: Prompt) -> None:
    """Sixteen bits and long prompts, and the same bits every time."""
    long = Prompt(**{**case.__dict__, "T": case.T + 1000})
    x = make(long, torch.bfloat16)
    found = triton_inputs(**x)
    check(found, truth(x), torch.finfo(torch.bfloat16).eps)
    for one, other in zip(found, triton_inputs(**x), strict=True):
        assert one is None or torch.equal(one, other)
