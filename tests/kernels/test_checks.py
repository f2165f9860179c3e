"""Wrong arguments raise an error that names the argument, what it got and what it needs."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltanet_kernels import (
    causal_conv1d,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_rms_norm,
    naive_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.checks import check_delta_rule
from support.refusals import assert_refused

FORMS = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule, naive_gated_delta_rule]


def delta_rule_inputs() -> dict[str, Any]:
    return {
        "q": torch.randn(1, 6, 2, 8),
        "k": torch.randn(1, 6, 2, 8),
        "v": torch.randn(1, 6, 4, 5),
        "g": -torch.rand(1, 6, 4),
        "beta": torch.rand(1, 6, 4),
    }


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q: got list, needs a tensor"),
    ({"v": torch.ones(1, 6, 4, 5, dtype=torch.int64)}, TypeError, "v: got dtype torch.int64, needs a float"),
    ({"g": torch.empty(1, 6, 4, device="meta")}, ValueError, "g: got device meta, needs cpu"),
    ({"q": torch.randn(6, 2, 8)}, ValueError, r"q: got shape \[6, 2, 8\], needs \[B, T, HQ, K\], none of them 0"),
    ({"q": torch.randn(1, 0, 2, 8)}, ValueError, r"q: got shape \[1, 0, 2, 8\], needs \[B, T, HQ, K\], none of them 0"),
    ({"v": torch.randn(1, 6, 4, 0)}, ValueError, r"v: got shape \[1, 6, 4, 0\], needs .* none of them 0"),
    ({"k": torch.randn(1, 5, 2, 8)}, ValueError, r"k: got shape \[1, 5, 2, 8\], needs .* = \[1, 6, H, 8\]"),
    ({"k": torch.randn(1, 6, 2, 9)}, ValueError, r"k: got shape .* = \[1, 6, H, 8\]"),
    ({"v": torch.randn(2, 6, 4, 5)}, ValueError, r"v: got shape .* = \[1, 6, HV, V\]"),
    ({"k": torch.randn(1, 6, 3, 8), "q": torch.randn(1, 6, 3, 8)}, ValueError,
     "v: got 4 heads, needs a multiple of the 3 heads of k"),
    ({"q": torch.randn(1, 6, 3, 8)}, ValueError, "q: got 3 heads, needs a multiple of the 2 heads of k"),
    ({"q": torch.randn(1, 6, 6, 8)}, ValueError,
     "q: got 6 heads, needs a multiple or a divisor of the 4 heads of v"),
    ({"g": torch.rand(1, 6, 2)}, ValueError, r"g: got shape \[1, 6, 2\], needs .* = \[1, 6, 4\]"),
    ({"g": torch.linspace(-1, 0.5, 24).view(1, 6, 4)}, ValueError, "g: got a log decay of 0.5, needs at most 0"),
    ({"beta": torch.rand(1, 6, 4, 1)}, ValueError, r"beta: got shape \[1, 6, 4, 1\]"),
    ({"initial_state": torch.rand(1, 4, 5, 8)}, ValueError, r"initial_state: .* = \[1, 4, 8, 5\]"),
    ({"initial_state": torch.ones(1, 4, 8, 5, dtype=torch.int64)}, TypeError,
     "initial_state: got dtype torch.int64, needs a float"),
    ({"initial_state": torch.rand(1, 4, 8, 5), "cu_seqlens": offsets(0, 3, 6)}, ValueError,
     r"initial_state: .* = \[2, 4, 8, 5\]"),
    ({"use_gate_in_kernel": True}, TypeError, "A_log: got NoneType, needs a tensor"),
    ({"A_log": torch.zeros(4)}, ValueError, "A_log: got a tensor, needs None"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(2)}, ValueError,
     r"dt_bias: got shape \[2\], needs \[HV\] = \[4\]"),
    ({"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens: got list"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens: got dtype torch.float32"),
    ({"cu_seqlens": offsets(0)}, ValueError, r"cu_seqlens: got shape \[1\]"),
    ({"cu_seqlens": offsets(1, 6)}, ValueError, "cu_seqlens: got a first offset of 1, needs 0"),
    ({"cu_seqlens": offsets(0, 4, 3, 6)}, ValueError,
     "cu_seqlens: got 4 followed by 3 at position 2"),
    ({"erase": "on"}, ValueError, "erase: got 'on', needs one of 'decayed', 'off', 'undecayed'"),
    ({"cu_seqlens": offsets(0, 7)}, ValueError, "cu_seqlens: got a last offset of 7, needs at most T"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_delta_rule_names_what_is_wrong(form: Callable[..., Any]) -> None:
    assert_refused(form, [(delta_rule_inputs() | changes, *refusal) for changes, *refusal in WRONG])


@pytest.mark.parametrize(("changes", "message"), [
    ({"k": torch.randn(1, 6, 2, 8).bfloat16()}, "k: got dtype torch.bfloat16, needs torch.float32"),
    ({"initial_state": torch.rand(1, 4, 8, 5).half()}, "initial_state: got dtype torch.float16, needs torch.float32"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(4)}, "dt_bias: got NoneType, needs"),
    ({"g": torch.full((1, 6, 4), 0.5)}, "g: got a log decay of 0.5, needs at most 0"),
])  # fmt: skip
def test_operators_that_convert_nothing_take_no_other_dtypes(changes: dict[str, Any], message: str) -> None:
    """Mesa, test-time training and Titans share the check of the gated delta rule."""
    with pytest.raises((TypeError, ValueError), match=message):
        check_delta_rule(RuleCall(**delta_rule_inputs() | changes))


def test_packing_needs_one_row() -> None:
    rows = {name: x.expand(2, *x.shape[1:]) for name, x in delta_rule_inputs().items()}
    with pytest.raises(ValueError, match="cu_seqlens: got a batch of 2 rows, needs one row"):
        chunk_gated_delta_rule(**rows, cu_seqlens=offsets(0, 6))


def test_offsets_changed_in_place_are_checked_again() -> None:
    cu_seqlens = offsets(0, 3, 6)
    inputs = delta_rule_inputs()
    chunk_gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 7
    with pytest.raises(ValueError, match="cu_seqlens: got 7 followed by 6"):
        chunk_gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 3
    shorter = {name: x[:, :5] for name, x in inputs.items()}
    with pytest.raises(ValueError, match="needs at most T = 5"):
        chunk_gated_delta_rule(**shorter, cu_seqlens=cu_seqlens)


WRONG_CONV: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": torch.randn(6, 4)}, ValueError, r"x: got shape \[6, 4\], needs \[B, T, D\]"),
    ({"weight": torch.randn(5, 4)}, ValueError, r"weight: got shape \[5, 4\], needs \[D, W\] = \[4, W\]"),
    ({"weight": torch.randn(4, 1, 4)}, ValueError, r"weight: got shape \[4, 1, 4\]"),
    ({"bias": torch.randn(3)}, ValueError, r"bias: got shape \[3\], needs \[D\] = \[4\]"),
    ({"activation": "relu"}, ValueError, "activation: got 'relu', needs None or 'silu'"),
    ({"initial_state": torch.randn(1, 4, 4)}, ValueError, r"initial_state: .* = \[1, 4, 3\]"),
    ({"cu_seqlens": offsets(0, 9)}, ValueError, "cu_seqlens: got a last offset of 9"),
]


def test_convolution_names_what_is_wrong() -> None:
    good = {"x": torch.randn(1, 6, 4), "weight": torch.randn(4, 4)}
    assert_refused(causal_conv1d, [(good | changes, *refusal) for changes, *refusal in WRONG_CONV])


WRONG_NORM: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"z": torch.randn(2, 3, 5)}, ValueError, r"z: got shape \[2, 3, 5\], needs the shape of x = \[2, 3, 4\]"),
    ({"weight": torch.randn(2, 4)}, ValueError, r"weight: got shape \[2, 4\], needs \[D\] or \[H, D\]"),
    ({"weight": torch.randn(2, 3, 4)}, ValueError, r"weight: got shape \[2, 3, 4\]"),
    ({"x": torch.tensor(1.0)}, ValueError, r"x: got shape \[\], needs \[..., D\]"),
    ({"z": torch.ones(2, 3, 4, dtype=torch.bool)}, TypeError, "z: got dtype torch.bool"),
]


def test_norm_names_what_is_wrong() -> None:
    good = {"x": torch.randn(2, 3, 4), "z": None, "weight": torch.randn(4), "eps": 1e-6}
    assert_refused(gated_rms_norm, [(good | changes, *refusal) for changes, *refusal in WRONG_NORM])


WRONG_OFFSETS_ON_A_GPU = """
import torch
from deltanet_kernels import chunk_gated_delta_rule

q, v, g = (torch.ones(1, 128, *size, device="cuda") for size in ((1, 16), (1, 16), (1,)))
cu_seqlens = torch.tensor({offsets}, dtype=torch.int32, device="cuda")
chunk_gated_delta_rule(q, q, v, -g, g / 2, cu_seqlens=cu_seqlens)
torch.cuda.synchronize()
print("went through")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [(1, 128), (0, 70, 60, 128), (0, 129)])
def test_wrong_offsets_on_a_gpu_stop_the_program(wrong: tuple[int, ...]) -> None:
    """In a process of its own: the device's assertion ends the whole CUDA context."""

    def run(cu_seqlens: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
        program = WRONG_OFFSETS_ON_A_GPU.format(offsets=cu_seqlens)
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert run((0, 70, 128)).stdout == "went through\n"
    failed = run(wrong)
    assert failed.returncode != 0
    assert "went through" not in failed.stdout
    assert "needs offsets from 0 that never decrease, at most T = 128" in failed.stderr
