"""Learned eviction: its attention against one of explicit masks, its bytes, and the training of its gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltanet_hf.errors import UserError
from deltanet_hf.models.cache_bits import set_cache_bits, stored_bytes
from deltanet_hf.models.restrict import restrict_heads
from deltanet_recipes.schema import Long
from measuring.eviction import attention, training
from measuring.eviction import gates as gates_module
from measuring.eviction.__main__ import share_of, training_rows
from measuring.eviction.attention import Reach, evicting_attention, packed
from measuring.eviction.gates import OPEN, Gates, Heads
from measuring.eviction.training import target, train_gates
from support.tiny_models import tiny_teacher

IDS = torch.randint(3, 97, (2, 128), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates_module, "WINDOW", 40)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, log_gates: Tensor, window: int, gated: bool) -> Tensor:
    """One head of `evicting_attention`, [T, D] each, pair by pair."""
    k, v, k4, v4 = (x[0, 0] for x in packed(k[None, None], v[None, None]))
    outputs = []
    for i, query in enumerate(q):
        scores, values = [], []
        for j in range(i + 1):
            near = i - j < window or j < 4
            own = near and (i // 32 == j // 32 or j < 4)
            key, value = (k[j], v[j]) if own else (k4[j], v4[j])
            if near or gated:
                scores.append(0.3 * query @ key + (0 if near else log_gates[j]))
                values.append(value)
        outputs.append(torch.stack(scores).softmax(0) @ torch.stack(values))
    return torch.stack(outputs)


def test_attention_is_that_of_explicit_masks() -> None:
    """Head 0 has gates, head 1 a window alone; two query heads read each."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 96, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    gates = -torch.rand(1, 2, 96, dtype=torch.float64, generator=generator) * 3
    gates.requires_grad_(True)
    reach = Reach(torch.tensor([40, 21]), torch.tensor([True, False]))
    found = evicting_attention(q, k, v, gates, reach, 0.3)
    wanted = torch.stack(
        [
            masked_attention(q[0, h], k[0, h // 2], v[0, h // 2], gates[0, h // 2], (40, 21)[h // 2], h < 2)
            for h in range(4)
        ]
    )
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=1e-6)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    (slope,) = torch.autograd.grad((found[0] * weights).sum(), gates)
    (expected,) = torch.autograd.grad((wanted * weights).sum(), gates)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-6)
    assert slope[0, 0, 4:50].abs().min() > 0
    assert not slope[0, 1].any()


@torch.no_grad()
def test_blocks_and_mask_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for GPUs, not compiled."""
    monkeypatch.setattr(attention, "compiled", lambda function: function)
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 6, 160, 9, generator=generator), torch.randn(2, 2, 480, 9, generator=generator)
    values = torch.randn(2, 2, 480, 8, generator=generator)
    reach = Reach(torch.tensor([40, 21]), torch.tensor([True, False]))
    found = attention.by_blocks(queries, keys, values, reach, 0.3)
    torch.testing.assert_close(found, attention.by_mask(queries, keys, values, reach, 0.3))


def with_gates(
    seed: int | None = None, scale: float = 1.0, family: str = "llama", **changes: Any
) -> tuple[torch.nn.Module, Gates]:
    """A teacher with gates in all heads; of random numbers if there is a seed."""
    model = tiny_teacher(family, **changes)
    gates = Gates(model, Heads.of(model.config)).eval()
    if seed is not None:
        torch.manual_seed(seed)
        for linear in gates.maps:
            torch.nn.init.normal_(linear.weight, std=scale)
            torch.nn.init.zeros_(linear.bias)
    return model, gates


@torch.no_grad()
def test_soft_and_hard_gates_agree_where_they_are_saturated() -> None:
    model, gates = with_gates(seed=0, scale=1e4)
    hard, kept = model(IDS).logits, gates.kept.item()
    gates.train()
    torch.testing.assert_close(model(IDS).logits, hard, rtol=0, atol=1e-3)
    assert gates.kept.item() == pytest.approx(kept, abs=1e-3)
    assert 0.2 < kept < 0.8
    gates.eval().threshold = -1e9
    assert (model(IDS).logits - hard).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "granite"])
@torch.no_grad()
def test_open_gates_leave_the_teacher_in_4_bits(family: str) -> None:
    model, _ = with_gates(family=family)
    packed = set_cache_bits(tiny_teacher(family), 4)(IDS).logits
    error = (model(IDS).logits - packed).abs().mean()
    assert error < 0.1 * (tiny_teacher(family)(IDS).logits - packed).abs().mean()


@torch.no_grad()
def test_gates_of_some_heads_are_maps_of_inputs_at_length_1() -> None:
    model: Any = tiny_teacher("llama")
    gates = Gates(model, Heads.of(model.config, ((0, 1), (2, 0), (2, 1)), (5,) * 4)).eval()
    gates.maps[0].weight.normal_(generator=torch.Generator().manual_seed(0))
    model(IDS)
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(IDS))
    wanted = (x / x.norm(dim=-1, keepdim=True)) @ gates.maps[0].weight[1] + OPEN
    torch.testing.assert_close(gates.numbers[0][:, 0], wanted)
    assert [numbers.shape[1] for numbers in gates.numbers] == [1, 0, 2, 0]
    assert gates.kept == 1  # none is below 0


def test_bytes_are_those_of_the_cache() -> None:
    teacher = tiny_teacher("llama")
    whole, windows = Heads.of(teacher.config), (33, 65, 65, 129)
    assert whole.bytes(500, 1.0) - stored_bytes(teacher, 500, 4) == 4 * (8 - 4)  # a count per head, not per layer
    assert whole.bytes(148, 0.5) == whole.bytes(96, 1.0) < whole.bytes(150, 0.5)  # half of what is beyond 40 + 4
    chosen = ((0, 1), (2, 0), (2, 1))
    policy = restrict_heads(tiny_teacher("llama"), {0: [1], 2: [0, 1]}, windows, 4)
    some = Heads.of(teacher.config, chosen, windows)
    assert some.bytes(500, 1.0) - stored_bytes(policy, 500, 4) == 4 * (8 - 5)
    share = some.share(some.bytes(2000, 0.3), 2000)
    assert share == pytest.approx(0.3, abs=0.02)  # groups of 32 tokens
    assert some.bytes(2000, share) <= some.bytes(2000, 0.3)
    with pytest.raises(UserError, match=r"^--keep: at 2,000 tokens gates leave 0\.\d to 0\.\d MB; give a budget"):
        some.share(10**9, 2000)


def test_budgets_and_rows_of_a_training(tmp_path: Path) -> None:
    teacher = tiny_teacher("llama")
    heads, allowed = Heads.of(teacher.config), int(0.12 * stored_bytes(teacher, 2000, 16))
    assert share_of("12%@2000", heads, teacher) == heads.share(allowed, 2000)
    assert share_of("25%", heads, teacher) == 0.25
    np.save(tmp_path / "text.npy", np.arange(1000))
    stage = Long(tokens=512, sequence_length=128, batch_tokens=256)
    rows = training_rows(tmp_path / "text.npy", stage, 0)
    assert sorted(rows.tolist()) == torch.arange(512).view(4, 128).tolist()
    assert not torch.equal(rows, torch.arange(512).view(4, 128))


def test_the_penalty_reaches_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "GATE_RATE", 0.3)  # for 40 steps
    assert [round(target(progress, 0.25), 3) for progress in (0, 0.375, 0.75, 1)] == [1, 0.4, 0.25, 0.25]
    model, gates = with_gates(num_hidden_layers=2)
    stage = Long(tokens=40 * 256, sequence_length=128, batch_tokens=256, train="frozen")
    rows = torch.randint(3, 97, (80, 128), generator=torch.Generator().manual_seed(1))
    said: list[str] = []
    before = model.model.layers[1].self_attn.q_proj.weight.clone()
    train_gates(tiny_teacher("llama", num_hidden_layers=2), model, gates, rows, stage, 0.25, 0, said.append)
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, before)
    with torch.no_grad():
        model(rows[-2:])
        assert gates.kept.item() == pytest.approx(0.25, abs=0.01)  # by the threshold
        gates.train()
        model(rows[-40:])
        assert gates.kept.item() == pytest.approx(0.25, abs=0.03)  # by the penalty
    assert said[0].startswith("step 0: KL ")
