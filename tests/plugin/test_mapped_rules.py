"""Rules that the gated delta rule computes after a change of its inputs: each against its recurrence, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltanet_hf import LayerTable
from deltanet_hf.mixers.additive import additive_rule
from deltanet_kernels import naive_gated_delta_rule
from deltanet_kernels.gated_delta_rule.reference import l2_normalize
from deltanet_kernels.rules.reference import naive_additive
from support.mapped_rules import B, H, K, T, V, close, draw, gradients, inputs, layer_of


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_additive_rule_is_its_recurrence(recurrent: bool) -> None:
    q, k, v, g, beta, S0 = inputs()

    def mapped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor) -> tuple[Tensor, Tensor]:
        o, new = additive_rule(q, k, v, g, beta, {"state": S0}, True, None, recurrent, "float32", False)
        return o, new["state"]

    def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor) -> tuple[Tensor, Tensor]:
        return naive_additive(q, k, v, g, beta, S0)

    with torch.no_grad():
        close(mapped(q, k, v, g, beta, S0), naive(q, k, v, g, beta, S0))
    if not recurrent:
        close(*(gradients(function, q, k, v, g, beta, S0) for function in (mapped, naive)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_the_additive_rule_in_short_dtypes(dtype: torch.dtype) -> None:
    """As exact as the rounding of inputs and outputs allows; values of 1e4 are no problem in float16."""
    q, k, v = (x.to(dtype) for x in (draw(B, T, H, K), draw(B, T, H, K, seed=1), 1e4 * draw(B, T, H, V, seed=2)))
    _, _, _, g, beta, _ = inputs()
    found, new = additive_rule(q, k, v, g.float(), beta.float(), None, True, None, False, "float32")
    units = (l2_normalize(x.double()) for x in (q, k))
    wanted, S = naive_additive(*units, v.double(), g, beta)
    assert found.dtype == dtype
    rounding = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    close((found.double(), new["state"].double()), (wanted, S), rounding)


@torch.no_grad()
def test_linear_attention_is_the_delta_rule_on_orthonormal_keys() -> None:
    """And a read of a stored key gives its value and what other keys share with it."""
    k = torch.linalg.qr(draw(K, K))[0].expand(1, 1, K, K).transpose(1, 2).contiguous()
    q, v = draw(1, K, 1, K, seed=1), draw(1, K, 1, V, seed=2)
    ones, zeros = torch.ones(1, K, 1, dtype=q.dtype), torch.zeros(1, K, 1, dtype=q.dtype)
    o, new = additive_rule(q, k, v, zeros, ones, None, True, None, False, "float32", False)
    close((o, new["state"]), naive_gated_delta_rule(q, k, v, zeros, ones, output_final_state=True))
    k = draw(1, 5, 1, K, seed=3)
    _, new = additive_rule(k, k, v[:, :5], zeros[:, :5], ones[:, :5], None, True, None, False, "float32", False)
    gram = k[0, :, 0] @ k[0, :, 0].T
    close((k[0, :, 0] @ new["state"][0, 0],), (gram @ v[0, :5, 0],))


@torch.no_grad()
def test_retention_with_rotation_is_a_complex_decay() -> None:
    """s_t = exp(g + i theta) s_{t-1} + conj(k) v^T and o = Re(q s), with K/2 complex channels."""
    q, k, v, _, beta, _ = inputs()
    theta, decay = torch.tensor([0.3, 1.1, 0.02, 2.0], dtype=torch.float64), -0.05
    turns = torch.exp(1j * theta * torch.arange(T)[:, None])[:, None]  # [T, 1, K/2]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turns
        return torch.cat([turned.real, turned.imag], dim=-1)

    g, ones = torch.full_like(beta, decay), torch.ones_like(beta)
    found, _ = additive_rule(rotated(q), rotated(k), v, g, ones, None, False, None, False, "float32", False)
    cq, ck = (torch.complex(*x.chunk(2, dim=-1)) for x in (q, k))
    s = torch.zeros(B, H, K // 2, V, dtype=torch.complex128)
    outputs = []
    for t in range(T):
        s = torch.exp(decay + 1j * theta)[:, None] * s + ck[:, t].conj()[..., None] * v[:, t, :, None].to(s.dtype)
        outputs.append(torch.einsum("bhk,bhkv->bhv", cq[:, t], s).real)
    close((found,), (K**-0.5 * torch.stack(outputs, dim=1),))


@pytest.mark.parametrize("name", ["gated_linear", "retention"])
@torch.no_grad()
def test_additive_layers_are_the_recurrence(name: str) -> None:
    layer = layer_of(name)
    x = draw(1, 9, 32)
    q, k, v = layer.project_qkv(x, None)
    g, beta = layer.gates(x, None)
    assert g.max() < 0
    assert beta.min() > 0
    wanted, _ = naive_additive(l2_normalize(q), l2_normalize(k), v, g.double(), beta.double())
    close((layer(x)[0],), (layer.o_proj(wanted.flatten(-2)),), 1e-6)


@torch.no_grad()
def test_deltanet_is_the_delta_rule_without_decay() -> None:
    layer = layer_of("deltanet")
    x = draw(1, 9, 32)
    q, k, v = layer.project_qkv(x, None)
    beta = layer.b_proj(x).sigmoid()
    wanted, _ = naive_gated_delta_rule(q, k, v, torch.zeros_like(beta), beta, use_qk_l2norm_in_kernel=True)
    close((layer(x)[0],), (layer.o_proj(wanted.flatten(-2)),), 1e-6)
    # With unit keys and strength 1 the state returns what was written last.
    key, one = l2_normalize(draw(1, 5, 4, 8)), torch.ones(1, 5, 4, dtype=x.dtype)
    value = draw(1, 5, 4, 8, seed=1)
    o, _ = layer.mix(key, key, value, (0 * one, one), None, False, None)
    close((o * 8**0.5,), (value,), 1e-5)


@pytest.mark.parametrize("name", ["gated_linear", "retention", "gla"])
def test_rules_that_erase_nothing_have_no_negative_eigenvalues(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.allow_neg_eigval: got true, but this rule erases nothing"):
        LayerTable.preset(4, name, allow_neg_eigval=True)


@pytest.mark.parametrize("name", ["gated_linear", "deltanet"])
def test_only_gated_deltanet_has_qwens_profile(name: str) -> None:
    with pytest.raises(ValueError, match=f"profile: got 'qwen3_5', but {name} has only faithful"):
        LayerTable.preset(4, name, "qwen3_5")
