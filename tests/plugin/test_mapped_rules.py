"""Rules that the gated delta rule computes after a change of its inputs: each against its recurrence, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltanet_hf import LayerTable
from deltanet_hf.fast.of_mixer import fast_mixer
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer import MixCall, State
from deltanet_hf.mixers.layer.delta_rule import DeltaRule, delta_rule
from deltanet_kernels import naive_gated_delta_rule
from deltanet_kernels.common.heads import l2_normalize
from support.mapped_rules import B, H, K, T, V, close, draw, gradients, inputs, layer_of
from support.recurrences import naive_additive


def additive_rule(call: MixCall, unit_length: bool = False, recurrent: bool = False) -> tuple[Tensor, State]:
    """The delta rule without erasing, of tokens one by one or in chunks."""
    return delta_rule(call, "float32", unit_length=unit_length, erase="off", recurrent=recurrent)


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_additive_rule_is_its_recurrence(recurrent: bool) -> None:
    q, k, v, g, beta, S0 = inputs()

    def mapped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S0: Tensor) -> tuple[Tensor, Tensor]:
        o, new = additive_rule(MixCall(q, k, v, (g, beta), None, {"state": S0}, True), recurrent=recurrent)
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
    found, new = additive_rule(MixCall(q, k, v, (g.float(), beta.float()), keep_state=True), unit_length=True)
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
    o, new = additive_rule(MixCall(q, k, v, (zeros, ones), keep_state=True))
    close((o, new["state"]), naive_gated_delta_rule(q, k, v, zeros, ones, output_final_state=True))
    k = draw(1, 5, 1, K, seed=3)
    _, new = additive_rule(MixCall(k, k, v[:, :5], (zeros[:, :5], ones[:, :5]), keep_state=True))
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
    found, _ = additive_rule(MixCall(rotated(q), rotated(k), v, (g, ones)))
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
    g, beta = layer.gates(layer.project(x), None)
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
    o, _ = layer.mix(MixCall(key, key, value, (0 * one, one)))
    close((o * 8**0.5,), (value,), 1e-5)


@torch.no_grad()
def test_gated_deltanet_is_a_matrix_on_the_values() -> None:
    """(QK^T * D)(I + KK^T * D^-)^-1 V with sqrt(beta) in k and v, D the decay between tokens, D^- without diagonal."""
    q, k, v, g, beta, _ = inputs()
    k = l2_normalize(k)
    wanted, _ = naive_gated_delta_rule(q, k, v, g, beta, scale=1.0)
    ungated, _ = naive_gated_delta_rule(q, k, v, 0 * g, beta, scale=1.0)
    q, k, v = (x.transpose(1, 2) for x in (q, k * beta.sqrt().unsqueeze(-1), v * beta.sqrt().unsqueeze(-1)))
    G = g.cumsum(1).transpose(1, 2)
    D = (G.unsqueeze(-1) - G.unsqueeze(-2)).tril().exp().tril()
    scores, eye = q @ k.mT, torch.eye(T, dtype=q.dtype)
    inside = scores * D @ torch.linalg.inv(eye + (k @ k.mT * D).tril(-1))
    delta = scores.tril() @ torch.linalg.inv(eye + (k @ k.mT).tril(-1))
    close((inside, inside @ v), (delta * D, wanted.transpose(1, 2)))
    close((delta @ v,), (ungated.transpose(1, 2),))


@torch.no_grad()
def test_a_rule_with_a_recurrence_of_its_own_is_not_decoded_as_gated_deltanet() -> None:
    class Negated(DeltaRule):
        name = "negated"

        def mix(self, call: MixCall) -> tuple[Tensor, State]:
            output, state = super().mix(call)
            return -output, state

    layer = layer_of("gated_deltanet")
    for kind, sign in ((GatedDeltaNet, 1), (Negated, -1)):
        layer.__class__ = kind
        caches, form = (MixerCacheLayer(), MixerCacheLayer()), fast_mixer(layer, False)
        for x in (draw(1, 3, 32), draw(1, 1, 32)):
            torch.testing.assert_close(form(x, None, None, caches[0]), layer(x, None, None, caches[1]))
        assert layer.is_gated_delta_rule == (sign == 1)


@pytest.mark.parametrize("name", ["gated_linear", "retention", "gla"])
def test_rules_that_erase_nothing_have_no_negative_eigenvalues(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.allow_neg_eigval: got true, but this rule erases nothing"):
        LayerTable.preset(4, name, allow_neg_eigval=True)


@pytest.mark.parametrize("name", ["gated_linear", "deltanet"])
def test_only_gated_deltanet_has_qwens_profile(name: str) -> None:
    with pytest.raises(ValueError, match=f"profile: got 'qwen3_5', but {name} has only faithful"):
        LayerTable.preset(4, name, "qwen3_5")
