"""EFLA, Comba and the normalised delta rule against their recurrences in float64, and at the edges of their ranges."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_hf import LayerTable
from deltanet_hf.mixers.comba import Feedback, contracting, undecayed_rule
from deltanet_hf.mixers.deltanet import normalisers
from deltanet_hf.mixers.efla import phi1, unit_key_inputs
from deltanet_hf.mixers.layer import MixCall
from deltanet_hf.mixers.layer.delta_rule import delta_rule
from deltanet_kernels.common.heads import l2_normalize
from support.mapped_rules import H, K, T, V, close, draw, gradients, inputs, layer_of
from support.recurrences import Step, naive_flow, naive_normalised_delta_rule, naive_undecayed
from support.refusals import assert_refused

STEPS: tuple[Step, ...] = ("exact", "implicit", "explicit")


def mapped_flow(
    step: Step, recurrent: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, eta: Tensor, S0: Tensor
) -> tuple[Tensor, Tensor]:
    values, beta = unit_key_inputs(k, v, eta, step)
    o, new = delta_rule(MixCall(q, k, values, (g, beta), None, {"state": S0}, True), "float32", recurrent=recurrent)
    return o, new["state"]


def naive_unit_flow(
    step: Step, q: Tensor, k: Tensor, v: Tensor, g: Tensor, eta: Tensor, S0: Tensor
) -> tuple[Tensor, Tensor]:
    return naive_flow(l2_normalize(q), k, v, g, eta, step, S0)


def flow_inputs() -> tuple[Tensor, ...]:
    """Keys of lengths 1e-3 to 30, one of them 0, and steps that do not overshoot."""
    q, k, v, g, beta, S0 = inputs()
    k = l2_normalize(k) * torch.logspace(-3, 1.5, T, dtype=k.dtype).view(1, T, 1, 1)
    k[0, 5, 1] = 0
    return q, k, v, g, beta / 1000, S0


@pytest.mark.parametrize("step", STEPS)
def test_efla_is_the_flow_and_its_steps(step: Step) -> None:
    given = flow_inputs()
    with torch.no_grad():
        for recurrent in (False, True):
            close(mapped_flow(step, recurrent, *given), naive_unit_flow(step, *given), 1e-11)
    short = tuple(x[:, :12] if x.dim() < 4 or x.shape[1] == T else x for x in given)
    functions = (partial(mapped_flow, step, False), partial(naive_unit_flow, step))
    close(*(gradients(function, *short) for function in functions), 1e-8)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e30), (torch.bfloat16, 1e30), (torch.float16, 6e4)])
@pytest.mark.parametrize("step", STEPS)
def test_efla_at_keys_of_any_length(step: Step, dtype: torch.dtype, largest: float) -> None:
    """No NaN, in values and gradients, and strengths of 0 to 1."""
    sizes = torch.tensor([0.0, 1e-7, 1e-4, 1.0, 20.0, 1e3, largest]).view(1, -1, 1, 1)
    k = (l2_normalize(draw(1, 7, 1, K, dtype=torch.float32)) * sizes).to(dtype).requires_grad_()
    v = draw(1, 7, 1, V, dtype=dtype).requires_grad_()
    eta = torch.tensor([0.0, 1e-3, 1.0, 1e3] * 2)[:7].view(1, 7, 1).requires_grad_()
    values, beta = unit_key_inputs(k, v.float() if dtype == torch.float16 else v, eta, step)
    assert 0 <= float(beta.detach().min()) <= float(beta.detach().max()) < 1 + 1e-5
    loss = values.float().sum() + beta.sum()
    for gradient in (loss, *torch.autograd.grad(loss, (k, v, eta))):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_phi1_and_its_gradient_do_not_cancel(dtype: torch.dtype) -> None:
    x = torch.cat([torch.zeros(1), torch.logspace(-12, 4, 500)]).to(dtype).requires_grad_()
    wide = x.detach().double()
    (gradient,) = torch.autograd.grad(phi1(x).sum(), x)
    exact = torch.where(wide == 0, 1.0, -torch.expm1(-wide) / wide.clamp_min(1e-300))
    slope = torch.where(wide < 1e-2, -1 / 2 + wide / 3 - wide**2 / 8 + wide**3 / 30, (torch.exp(-wide) - exact) / wide)
    tolerance = 3e-7 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(phi1(x).detach().double(), exact, rtol=tolerance, atol=0)
    torch.testing.assert_close(gradient.double(), slope, rtol=max(10 * tolerance, 1e-8), atol=0)


def test_comba_is_its_recurrence() -> None:
    q, k, v, g, eta, S0 = inputs()
    f = torch.tensor([0.7, 0.05], dtype=q.dtype)

    def mapped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, eta: Tensor, f: Tensor, S0: Tensor) -> tuple[Tensor, Tensor]:
        o, new = undecayed_rule(MixCall(q, k, v, (g, eta), None, {"state": S0}, True), f, "float32")
        return o, new["state"]

    def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, eta: Tensor, f: Tensor, S0: Tensor) -> tuple[Tensor, Tensor]:
        k = l2_normalize(k)
        return naive_undecayed(l2_normalize(q), k, v, g, eta, f.unsqueeze(-1) * k, S0)

    close(mapped(q, k, v, g, eta, f, S0), naive(q, k, v, g, eta, f, S0))
    close(*(gradients(function, q, k, v, g, eta, f, S0) for function in (mapped, naive)), 1e-11)


@pytest.mark.parametrize("decay", [-25.0, -60.0, -150.0, -1e4])
def test_comba_survives_every_decay(decay: float) -> None:
    q, k, v, g, eta, _ = (x.float() for x in inputs())
    g = torch.where(torch.arange(T).view(1, T, 1) % 7 == 3, decay, g)
    f = torch.tensor([0.98, 0.5])
    given = (q, k, v, g, eta)
    mapped = [x.clone().requires_grad_() for x in given]
    naive = [x.double().requires_grad_() for x in given]
    o, _ = undecayed_rule(MixCall(*mapped[:3], tuple(mapped[3:])), f, "float32")
    unit = l2_normalize(naive[1])
    wanted, _ = naive_undecayed(
        l2_normalize(naive[0]), unit, naive[2], naive[3], naive[4], f.double().unsqueeze(-1) * unit
    )
    close((o.detach().double(),), (wanted.detach(),), 5e-6)
    found = torch.autograd.grad(o.sum(), mapped)
    close([x.double() for x in found], torch.autograd.grad(wanted.sum(), naive), 5e-5)


@pytest.mark.parametrize("decay", [-0.1, -3.0, -1e4])
@pytest.mark.parametrize("name", ["comba", "titans"])
@torch.no_grad()
def test_the_largest_strengths_do_not_let_the_state_grow(name: str, decay: float) -> None:
    """The prediction reads the state before the decay, so a strength of 2 would be too much for a state that decays."""
    layer = layer_of(name, allow_neg_eigval=True)
    k, v = (draw(1, 1, 4, 8, seed=seed).expand(-1, 300, -1, -1) for seed in (0, 1))
    g = torch.full((1, 300, 4), decay, dtype=k.dtype)
    further = (torch.full_like(g, -1.0),) if name == "titans" else ()
    gates = (g, layer.strength(torch.full_like(g, 30.0)).double(), *further)
    o, new = layer.mix(MixCall(k, k, v, gates, keep_state=True))
    assert o.abs().max() < 3 * v.abs().max()
    assert new["state"].abs().max() < 9 * v.abs().max()
    # Without decay the strength of 2 is reached: an eigenvalue of -1.
    assert contracting(torch.tensor(2.0), torch.tensor(0.0)) == 2


@torch.no_grad()
def test_the_comba_layer_corrects_its_queries_before_the_norm() -> None:
    part = Feedback(2, 4)
    q, k = draw(1, 3, 4, K, dtype=torch.float32), draw(1, 3, 2, K, seed=1, dtype=torch.float32)
    assert torch.equal(part(q, k)[0], q)
    part.correction.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
    part.feedback.copy_(torch.tensor([0.0, -1e9]))
    found, f = part(q, k)
    torch.testing.assert_close(f, torch.tensor([0.5, 9.1105e-4]), rtol=1e-4, atol=0)
    torch.testing.assert_close(found[:, :, 1], q[:, :, 1] - 0.5 * k[:, :, 0])
    torch.testing.assert_close(found[:, :, 2], q[:, :, 2] - 2 * f[1] * k[:, :, 1])
    layer = layer_of("comba", expand_kv=False)
    x = draw(1, 9, 32)
    q, k, v = layer.project_qkv(x, None)
    g, eta = (gate.double() for gate in layer.gates(layer.project(x), None))
    q, f = layer.closed_loop(q, k)
    k, v, g, eta, f = (x.repeat_interleave(2, dim=-1 if x.dim() < 4 else 2) for x in (k, v, g, eta, f.double()))
    unit = l2_normalize(k)
    wanted, _ = naive_undecayed(l2_normalize(q), unit, v, g, eta, f.unsqueeze(-1) * unit)
    close((layer(x)[0],), (layer.o_proj(wanted.flatten(-2)),), 1e-6)


def test_the_normalised_delta_rule_is_its_recurrence() -> None:
    """The definition, where d is not at its lower bound: keys of nearly equal direction."""
    q, k, v, _, beta, _ = inputs()
    k = 1 + 0.1 * k.sigmoid() * torch.linspace(1, 2, T, dtype=k.dtype).flip(0).view(1, T, 1, 1)

    def mapped(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        d, _ = normalisers(k, beta, None, None)
        call = MixCall(q, k, v * d.unsqueeze(-1), (0 * beta, beta / d), keep_state=True)
        o, new = delta_rule(call, "float32", unit_length=False)
        return o, new["state"]

    d, key_sum = normalisers(k, beta, None, None)
    bound = k.square().sum(-1)
    assert bool((d[:, 2:] > bound[:, 2:]).all())
    close((key_sum,), (k.sum(1),))
    k = torch.cat([k[:, :1], k[:, :1], k[:, 2:]], dim=1)  # the second token's d is exactly its bound
    with torch.no_grad():
        close(mapped(q, k, v, beta), naive_normalised_delta_rule(q, k, v, beta), 1e-11)


@torch.no_grad()
def test_normalisers_of_packed_padded_and_continued_sequences() -> None:
    k, beta = draw(1, 20, H, K).exp(), torch.ones(1, 20, H, dtype=torch.float64)
    d, key_sum = normalisers(k, beta, None, None)
    first, z = normalisers(k[:, :7], beta[:, :7], None, None)
    second, last = normalisers(k[:, 7:], beta[:, 7:], z, None)
    close((torch.cat([first, second], 1), last), (d, key_sum))
    packed, _ = normalisers(k, beta, None, torch.tensor([0, 7, 7, 20]))
    alone, _ = normalisers(k[:, 7:], beta[:, 7:], None, None)
    close((packed,), (torch.cat([first, alone], 1),))
    hidden = beta.clone()
    hidden[:, 3:5] = 0
    kept = [t for t in range(20) if t not in (3, 4)]
    with_padding, z = normalisers(k, hidden, None, None)
    without, other = normalisers(k[:, kept], beta[:, kept], None, None)
    close((with_padding[:, kept], z), (without, other))


def test_settings_that_do_not_fit_are_named() -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("efla", {"flow_step": "midpoint"}, "flow_step: got 'midpoint', expected one of exact, implicit, explicit"),
        ("efla", {"allow_neg_eigval": True}, "allow_neg_eigval: got true, but this rule has eigenvalues 0 to 1"),
        ("deltanet", {"normalised": 1}, "normalised: got 1, expected true or false"),
        ("deltanet", {"normalised": True, "allow_neg_eigval": True}, "allow_neg_eigval: got true, but"),
        ("linear", {"feature_map": "relu"}, "feature_map: got 'relu', expected one of none, elu, taylor"),
        ("linear", {"feature_map": "taylor", "feature_dim": 22}, "feature_dim: got 22, expected 1 to 21"),
        ("gated_deltanet", {"conv_on": "v"}, "conv_on: got 'v', expected one of qkv, k"),
    ]
    preset = functools.partial(LayerTable.preset, 4)
    assert_refused(preset, [({"mixer": name, **changes}, ValueError, said) for name, changes, said in rows])
