"""Gated DeltaProduct: the layer against its recurrence, and what only it has.

Padding, packing and decoding are in `test_every_family_and_rule.py`, compiled steps in `test_decoding.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from deltanet_hf.mixers.deltaproduct import DeltaProduct, interleave
from deltanet_kernels import chunk_gated_delta_rule
from support.tiny_models import tiny_student

TOKENS = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(6))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


def delta_product(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """One sequence, one state: q [T, D], k, v [T, n_h, D], g [T], beta [T, n_h] -> [T, D] (arXiv 2502.10297)."""
    S = torch.zeros(k.shape[-1], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(len(q)):
        S = g[t].exp() * S
        for j in range(k.shape[1]):
            key = F.normalize(k[t, j], dim=0)
            S = S - beta[t, j] * torch.outer(key, key @ S) + beta[t, j] * torch.outer(key, v[t, j])
        outputs.append(F.normalize(q[t], dim=0) @ S / len(q[t]) ** 0.5)
    return torch.stack(outputs)


@pytest.mark.parametrize(("steps", "heads"), [(1, (4, 4, 4)), (2, (2, 2, 4)), (3, (4, 2, 2))])
def test_interleaved_steps_are_the_recurrence(steps: int, heads: tuple[int, int, int]) -> None:
    H, HK, HV = heads  # of q, of k in a step, of v in a step
    B, T, D = 2, 9, 5
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    q, k, v = draw(B, T, H, D), draw(B, T, steps * HK, D), draw(B, T, steps * HV, D)
    g, beta = -draw(B, T, HV).exp(), draw(B, T, steps * HV).sigmoid()
    inputs = interleave(q, k, v, g, beta)
    o, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    found = o.view(B, T, steps, -1, D)[:, :, -1]
    k, v, beta = (x.unflatten(2, (steps, -1)) for x in (k, v, beta))
    outputs = max(H, HV)
    for b in range(B):
        for j in range(outputs):
            state = j // (outputs // HV)
            key = state // (HV // HK)
            query = q[b, :, j // (outputs // H)]
            wanted = delta_product(query, k[b, :, :, key], v[b, :, :, state], g[b, :, state], beta[b, :, :, state])
            torch.testing.assert_close(found[b, :, j], wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("steps", "expand_kv"), [(2, False), (3, True)])
def test_the_layer_decays_first_writes_its_own_step_last_and_reads(steps: int, expand_kv: bool) -> None:
    """Without convolution, offset, norm and gate the layer is the recurrence between its projections."""
    changes = {"conv_size": 0, "output_norm": "none", "output_gate": False, "rope": False, "qk_activation": "none"}
    changes["k_offset"] = False
    model = tiny_student("llama", mixer="deltaproduct", num_householder=steps, expand_kv=expand_kv, **changes).double()
    mixer: Any = model.model.layers[0].self_attn
    x = torch.randn(1, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found, _ = mixer(x)
    D, groups = mixer.head_dim, mixer.num_heads // mixer.num_states
    parts = [*reversed(mixer.householder), mixer]  # in the order in which they write
    k = torch.stack([part.k_proj(x)[0] for part in parts], 1).unflatten(-1, (-1, D))  # [T, n_h, HV, D]
    v = torch.stack([part.v_proj(x)[0] for part in parts], 1).unflatten(-1, (-1, D))
    beta = torch.stack([part.b_proj(x)[0] for part in parts], 1).sigmoid()
    q, g = mixer.q_proj(x)[0].unflatten(-1, (-1, D)), mixer.decay(mixer.a_proj(x))[0].double()
    heads = [
        delta_product(q[:, h], k[:, :, s], v[:, :, s], g[:, s], beta[:, :, s])
        for h in range(mixer.num_heads)
        for s in [h // groups]
    ]
    torch.testing.assert_close(found[0], mixer.o_proj(torch.cat(heads, dim=-1)), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_step_of_strength_zero_is_no_step() -> None:
    plain, more = (
        tiny_student("qwen3", conv_size=0),
        tiny_student("qwen3", conv_size=0, mixer="deltaproduct", num_householder=3),
    )
    more.load_state_dict(plain.state_dict(), strict=False)
    wanted = plain(TOKENS).logits
    steps: Any = [step for block in more.model.layers for step in block.self_attn.householder]
    for step in steps:
        step.b_proj.bias.fill_(-1e4)
    close(more(TOKENS).logits, wanted)
    steps[0].b_proj.bias.zero_()
    assert (more(TOKENS).logits - wanted).abs().max() > 1e-2


def test_gradients_reach_every_step_from_its_start() -> None:
    model = tiny_student("qwen3", mixer="deltaproduct", num_householder=3)
    mixers = [module for module in model.modules() if isinstance(module, DeltaProduct)]
    for mixer in mixers:
        for step in mixer.householder:
            step.start(mixer.k_proj, mixer.max_strength)
    model(TOKENS, labels=TOKENS).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    strength = mixers[0].householder[0].b_proj(torch.randn(3, 32)).sigmoid()
    assert float(strength.detach().max()) == pytest.approx(0.02, rel=1e-4)


def test_default_lora_targets_the_new_values_too() -> None:
    model = get_peft_model(
        tiny_student("llama", mixer="deltaproduct", num_householder=2), LoraConfig(r=2, task_type="CAUSAL_LM")
    )
    assert any("householder.0.v_proj.lora_A" in name for name, _ in model.named_parameters())


@torch.no_grad()
def test_a_start_from_scratch_has_no_trained_step() -> None:
    layer: Any = tiny_student("llama", mixer="deltaproduct", num_householder=2).model.layers[0].self_attn
    layer.start_from_scratch(0.2)
    step = layer.householder[0]
    assert not step.b_proj.bias.any()
    for linear in (step.k_proj, step.v_proj, step.b_proj):
        assert float(linear.weight.std()) == pytest.approx(0.2, rel=0.3)
