"""The short convolution and the gated norm in PyTorch, against torch.nn.functional and the formula in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from deltanet_kernels import causal_conv1d, gated_rms_norm


def conv_in_float64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
) -> torch.Tensor:
    """[B, T, D] by torch's own convolution behind the state."""
    D, W = weight.shape
    past = torch.zeros(x.shape[0], D, W - 1) if state is None else state
    rows = torch.cat([past.double(), x.double().transpose(1, 2)], dim=2)
    y = F.conv1d(rows, weight.double().unsqueeze(1), None if bias is None else bias.double(), groups=D)
    return y.transpose(1, 2)


@pytest.mark.parametrize(
    ("T", "W", "activation", "full"),
    [
        *((T, W, "silu", True) for T, W in ((1, 1), (1, 4), (2, 4), (3, 4), (4, 2), (9, 4))),
        *((T, W, None, False) for T, W in ((1, 4), (9, 4), (9, 1))),
        (9, 4, "silu", False),
        (9, 4, None, True),
    ],
)
def test_convolution(T: int, W: int, activation: str | None, full: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, T, 6, requires_grad=True), torch.randn(6, W, requires_grad=True)
    bias = torch.randn(6, requires_grad=True) if full else None
    state = torch.randn(2, 6, W - 1, requires_grad=True) if full else None
    y, final = causal_conv1d(x, weight, bias, activation, state, output_final_state=True)
    wanted = conv_in_float64(x, weight, bias, state)
    wanted = F.silu(wanted) if activation else wanted
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=2e-6)

    past = torch.zeros(2, 6, W - 1) if state is None else state
    assert torch.equal(final, torch.cat([past, x.transpose(1, 2)], dim=2)[:, :, T:])

    leaves = [leaf for leaf in (x, weight, bias, state) if leaf is not None and leaf.numel()]
    upstream, upstream_state = torch.randn_like(y), torch.randn_like(final)
    found = torch.autograd.grad([y, final], leaves, [upstream, upstream_state], allow_unused=True)
    tail = torch.cat([past, x.transpose(1, 2)], dim=2)[:, :, T:].double()
    expected = torch.autograd.grad(
        [wanted, tail], leaves, [upstream.double(), upstream_state.double()], allow_unused=True
    )
    for gradient, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-5)


def test_packed_convolution_is_each_sequence_alone() -> None:
    torch.manual_seed(0)
    offsets = [0, 0, 1, 3, 3, 10, 10]
    x, weight, bias = torch.randn(1, 13, 5), torch.randn(5, 4), torch.randn(5)
    state = torch.randn(6, 5, 3)
    x[:, 10:] = torch.nan  # after the last sequence
    y, final = causal_conv1d(x, weight, bias, "silu", state, True, torch.tensor(offsets))
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            assert torch.equal(final[n], state[n])
            continue
        alone, alone_final = causal_conv1d(x[:, start:end], weight, bias, "silu", state[n : n + 1], True)
        torch.testing.assert_close(y[:, start:end], alone, rtol=0, atol=1e-6)
        assert torch.equal(final[n], alone_final[0])
    assert (y[:, 10:] == 0).all()


def test_packed_convolution_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 9, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    state = torch.randn(3, 3, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 8], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda x, w, s: causal_conv1d(x, w, None, "silu", s, True, offsets), (x, weight, state)
    )


def test_convolution_can_be_the_identity_and_keeps_the_dtype() -> None:
    x = torch.randn(2, 7, 4).bfloat16()
    weight = torch.zeros(4, 4)
    weight[:, -1] = 1
    y, final = causal_conv1d(x, weight, output_final_state=True)
    assert torch.equal(y, x)
    assert final.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("per_head", "gated", "D"),
    [(False, False, 16), (False, True, 100), (True, False, 100), (True, True, 16), (True, True, 1)],
)
def test_gated_norm(per_head: bool, gated: bool, D: int) -> None:
    torch.manual_seed(0)
    x, z = torch.randn(2, 5, 3, D, requires_grad=True), torch.randn(2, 5, 3, D, requires_grad=True)
    weight = torch.randn(*((3, D) if per_head else (D,)), requires_grad=True)
    y = gated_rms_norm(x, z if gated else None, weight, 1e-3)
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    if gated:
        wanted = wanted * z.double() * z.double().sigmoid()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=2e-6)
    leaves = [x, weight, z] if gated else [x, weight]
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, upstream)
    expected = torch.autograd.grad(wanted, leaves, upstream.double())
    for gradient, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-5, atol=1e-5)


def test_gated_norm_computes_in_float32_and_returns_the_dtype_of_x() -> None:
    torch.manual_seed(0)
    x, z, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(64)
    y = gated_rms_norm(x, z, weight, 1e-6)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, gated_rms_norm(x.float(), z.float(), weight, 1e-6).bfloat16())
