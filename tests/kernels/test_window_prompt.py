"""The operators behind the attention of a prompt: the mixture with a state's output, and the cache for decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import window_keep, window_mixture
from deltanet_kernels.window.calls import WindowKeepCall, WindowMixtureCall
from deltanet_kernels.window.cpu_prompt import torch_window_mixture
from deltanet_kernels.window.keep import window_keep_op
from deltanet_kernels.window.mixture import window_mixture_op, window_mixture_triton
from support.refusals import assert_refused
from tests.kernels.cases import relative_error
from tests.kernels.test_window_step import Step, empty, expected_cache
from tests.kernels.test_window_step import make as make_steps
from tests.kernels.triton_mode import DEVICE, GPU, triton_keep


@dataclass(frozen=True)
class Mixture:
    """One call of `window_mixture`."""

    name: str
    T: int = 13
    B: int = 2
    H: int = 3
    D: int = 16
    places: int = 5
    reach: int | None = None
    numbers: str = "none"  # none | one row | rows
    gate: bool = True
    norm: str = "per_head"  # none | shared | per_head
    before: int = 0  # first tokens without a state's output

    def __str__(self) -> str:
        return self.name


CASES = [
    Mixture("a whole prompt"),
    Mixture("going on", numbers="one row"),
    Mixture("rows of their own", numbers="rows", norm="shared"),
    Mixture("no gate", gate=False, reach=9),
    Mixture("no norm", norm="none", numbers="one row"),
    Mixture("neither", norm="none", gate=False),
    Mixture("nothing is out of sight", places=20),
    Mixture("a reach within the places", reach=4),
    Mixture("a reach equal to the places", reach=5),
    Mixture("a state from the fifth token on", before=4),
    Mixture("the same, going on", before=4, numbers="one row", reach=9),
    Mixture("the same, rows of their own", before=12, numbers="rows"),
    Mixture("a state of no token", before=13),
    Mixture("heads of 64, several tiles", D=64, H=9, T=9, B=1, places=3),
    Mixture("heads of 100", D=100, H=1, B=1, places=1),
    Mixture("heads of 1", D=1, T=1, places=1, numbers="rows"),
]
TENSORS = ("window_output", "lse", "state_output", "share_logit", "far_slope", "near_slope", "z", "norm_weight")


def make(case: Mixture, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    B, T, H, D = case.B, case.T, case.H, case.D
    numbers = {
        "none": None,
        "one row": torch.arange(3, T + 3)[None],
        "rows": torch.arange(T)[None].add(torch.arange(B)[:, None] * 2).int(),  # a 0 in the first
    }[case.numbers]
    return {
        "window_output": randn(B, T, H, D).to(dtype),
        "lse": randn(B, T, H),
        "state_output": randn(B, T, H, D).to(dtype)[:, case.before :].contiguous(),
        "share_logit": randn(B, T, H).to(dtype),
        "far_slope": 1 + 0.3 * randn(H),
        "near_slope": 1 + 0.3 * randn(H),
        "places": case.places,
        "reach": case.reach,
        "numbers": None if numbers is None else numbers.to(DEVICE),
        "z": randn(B, T, H, D).to(dtype) if case.gate else None,
        "norm_weight": {"none": None, "shared": randn(D), "per_head": randn(H, D)}[case.norm],
        "eps": 1e-3,
    }


def truth(x: dict[str, Any]) -> Tensor:
    """The definition in float64, token by token."""
    y = {name: None if x[name] is None else x[name].cpu().double() for name in TENSORS}
    B, T = y["window_output"].shape[:2]
    o = torch.empty_like(y["window_output"])
    state_output = F.pad(y["state_output"], (0, 0, 0, 0, T - y["state_output"].shape[1], 0))
    if y["norm_weight"] is not None:
        state_output = (
            state_output / (state_output.square().mean(-1, keepdim=True) + x["eps"]).sqrt() * y["norm_weight"]
        )
    if y["z"] is not None:
        state_output = state_output * F.silu(y["z"])
    numbers = torch.arange(1, T + 1)[None] if x["numbers"] is None else x["numbers"].cpu()
    for b in range(B):
        for t, n in enumerate(numbers.expand(B, T)[b].tolist()):
            unseen = min(n, x["reach"] or n) - x["places"]
            logit = y["share_logit"][b, t] - y["near_slope"] * y["lse"][b, t]
            share = (logit + y["far_slope"] * torch.tensor(float(unseen)).log()).sigmoid() if unseen > 0 else 0 * logit
            o[b, t] = y["window_output"][b, t] + share[:, None] * (state_output[b, t] - y["window_output"][b, t])
    return o


def triton_mixture(**x: Any) -> Tensor:
    return window_mixture_triton(WindowMixtureCall(**x))


SIDES = [pytest.param(window_mixture, id="public"), pytest.param(triton_mixture, id="triton")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixture(case: Mixture, poisoned_memory: None) -> None:
    x = make(case)
    wanted = truth(x)
    for mix in (window_mixture, triton_mixture):
        assert relative_error(mix(**x), wanted) < 1e-6, mix


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    x = make(CASES[0], dtype)
    found, separate, wanted = triton_mixture(**x), torch_window_mixture(WindowMixtureCall(**x)), truth(x)
    assert found.dtype == dtype
    # Triton's interpreter cuts off where it makes bfloat16.
    allowance = 1.0 if GPU or dtype == torch.float16 else 1.5
    assert relative_error(found, wanted) <= allowance * relative_error(separate, wanted)


@pytest.mark.parametrize("mix", SIDES)
def test_inputs_may_be_slices_of_wider_tensors(mix: Callable[..., Tensor]) -> None:
    x = make(CASES[0])
    H, D = x["window_output"].shape[2:]
    joint = torch.cat([x["z"].flatten(2), x["share_logit"], x["share_logit"] + torch.nan], dim=-1)
    writes = torch.stack([x["state_output"] + torch.nan, x["state_output"]], dim=2).flatten(1, 2)[:, 1::2]
    parts = {"z": joint[..., : H * D].unflatten(-1, (H, D)), "share_logit": joint[..., H * D : H * D + H]}
    assert relative_error(mix(**x | parts | {"state_output": writes}), truth(x)) < 1e-6


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("mix", SIDES)
def test_a_share_may_saturate(mix: Callable[..., Tensor]) -> None:
    x = make(Mixture("saturated", H=2, norm="none", gate=False))
    x["share_logit"][:] = torch.tensor([1e4, -1e4], device=DEVICE)
    o = mix(**x)[:, 5:]
    torch.testing.assert_close(o[:, :, 0], x["state_output"][:, 5:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(o[:, :, 1], x["window_output"][:, 5:, 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("T", "window", "sinks", "D"),
    [(16, 5, 3, 16), (5, 5, 3, 16), (3, 5, 3, 7), (2, 5, 3, 16), (12, 5, 0, 16), (10, 1, 2, 16), (20, 3, 12, 16),
     (9, 130, 4, 64), (1, 1, 0, 1)],
)  # fmt: skip
def test_cache_after_a_prompt(T: int, window: int, sinks: int, D: int, poisoned_memory: None) -> None:
    """The one that decoding steps make of the same tokens, bit for bit."""
    case = Step("prompt", T=T, window=window, sinks=sinks, D=D)
    x = make_steps(case)
    wanted = expected_cache(case, x)
    wide = torch.cat([x["k"].flatten(2), x["v"].flatten(2)], dim=-1).split(2 * D, dim=-1)
    layouts = ((x["k"], x["v"]), (wide[0].unflatten(-1, (2, D)), wide[1].unflatten(-1, (2, D))))
    for keep, (k, v) in itertools.product((window_keep, triton_keep), layouts):
        for name, found in zip(("keys", "values", "numbers", "count"), keep(k, v, window, sinks), strict=True):
            assert found.dtype == empty(case)[name].dtype, (keep, name)
            assert found.is_contiguous(), (keep, name)
            assert torch.equal(found.cpu(), wanted[name]), (keep, name)


@pytest.mark.parametrize("length", [1, 3, 12, 15, 16])
def test_cache_after_a_prompt_with_padding(length: int, poisoned_memory: None) -> None:
    """As without it, whatever the padding is; the number of tokens is on the device."""
    k, v = (torch.randn(2, 16, 3, 16, device=DEVICE) for _ in range(2))
    tokens = torch.tensor([length], device=DEVICE)
    for keep, (window, sinks) in itertools.product((window_keep, triton_keep), ((5, 3), (40, 2), (1, 0))):
        wanted = keep(k[:, :length], v[:, :length], window, sinks)
        for one, other in zip(keep(k, v, window, sinks, tokens), wanted, strict=True):
            assert torch.equal(one, other), (keep, window)
            assert one.dtype == other.dtype, (keep, window)


def test_the_operators_are_registered_consistently() -> None:
    torch.library.opcheck(window_mixture_op.op, WindowMixtureCall(**make(Mixture("small", T=3, B=1, H=1))))
    torch.library.opcheck(window_keep_op.op, WindowKeepCall(*torch.randn(2, 1, 3, 1, 16, device=DEVICE), 2, 1))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"window_output": torch.zeros(2, 13, 3)}, "window_output: got shape"),
    ({"lse": torch.zeros(2, 13, 2)}, r"lse: got shape \[2, 13, 2\], needs \[B, T, H\]"),
    ({"state_output": torch.zeros(2, 13, 3, 15)}, "state_output: got shape"),
    (
        {"state_output": torch.zeros(2, 14, 3, 16)},
        r"state_output: got shape .* needs \[B, T', H, D\] = \[2, 13, 3, 16\]",
    ),
    ({"far_slope": torch.zeros(4)}, r"far_slope: got shape \[4\], needs \[H\]"),
    ({"places": 0}, "places: got 0, needs at least 1"),
    ({"reach": 2.0}, "reach: got float, needs int"),
    ({"numbers": torch.zeros(1, 13)}, "numbers: got dtype torch.float32, needs torch.int32 or torch.int64"),
    ({"numbers": torch.zeros(3, 13).int()}, r"numbers: got shape \[3, 13\], needs \[B, T\] = \[2, 13\]"),
    ({"z": torch.zeros(2, 13, 48)}, "z: got shape"),
    ({"z": torch.zeros(2, 13, 3, 16).requires_grad_()}, "window_mixture has no gradients"),
    ({"norm_weight": torch.zeros(17)}, r"norm_weight: got shape \[17\], needs \[D\] = \[16\]"),
]


def test_bad_arguments() -> None:
    x = {name: y.cpu() if isinstance(y, Tensor) else y for name, y in make(CASES[0]).items()}
    assert_refused(window_mixture, [(x | changes, (TypeError, ValueError), message) for changes, message in WRONG])


def test_bad_arguments_of_the_cache() -> None:
    k = torch.zeros(1, 3, 2, 4)
    for arguments, message in (
        ((k, k[:, :2], 2, 0), r"v: got shape .* = \[1, 3, 2, 4\]"),
        ((k, k.half(), 2, 0), "v: got dtype torch.float16"),
        ((k, k, 0, 0), "window: got 0, needs at least 1"),
        ((k, k, 1, -1), "sinks: got -1, needs at least 0"),
        ((k.clone().requires_grad_(), k, 1, 0), "window_keep has no gradients"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            window_keep(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_long_prompts_on_a_gpu(D: int) -> None:
    x = make(Mixture("long", T=1500, H=9, D=D, places=260), torch.bfloat16)
    found = triton_mixture(**x)
    assert relative_error(found, truth(x)) < torch.finfo(torch.bfloat16).eps
    assert torch.equal(found, triton_mixture(**x))
    for T in (100, 1500):
        case = Step("long", T=T, window=256, sinks=4, D=D)
        y = make_steps(case, torch.bfloat16)
        found = window_keep(y["k"], y["v"], 256, 4)
        wanted = expected_cache(case, y)
        for one, other in zip(found, wanted.values(), strict=True):
            assert torch.equal(one.float().cpu(), other.float())
