"""Activations that are computed again: the same losses and gradients, less memory, and nothing that a graph forbids."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from deltanet_recipes.data.packing import make_rows
from deltanet_recipes.training.layer_runner import LayerRunner, document_boundaries
from deltanet_recipes.training.losses import Head, KlTerms, live_chunk
from deltanet_recipes.training.model_pair import decoder_layers, mixers
from deltanet_recipes.training.objectives import AlignLoss, Batch, DistilLoss
from support.tiny_models import tiny_student, tiny_teacher

EOS = 2


def batch() -> Batch:
    """Two rows with two documents each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 70), generator=generator).numpy()
    ids[0, 20] = ids[1, 43] = EOS
    rows = make_rows(ids, ids > 0, EOS, True)
    return Batch(rows, document_boundaries(rows.position_ids), torch.tensor(float(rows.scored.sum())))


def objective(kind: str, checkpointing: bool, student: nn.Module, teacher: nn.Module) -> Any:
    if kind == "align":
        return AlignLoss(teacher, student, checkpointing=checkpointing)
    chunk = live_chunk(Head(), Head(), KlTerms())
    return DistilLoss(student, teacher, chunk, 50, float(kind == "hidden"), checkpointing)


@pytest.mark.parametrize("kind", ["align", "hidden"])
def test_losses_and_gradients_are_the_same_and_less_is_kept(kind: str) -> None:
    teacher = tiny_teacher("llama").requires_grad_(False)
    found = []
    for checkpointing in (False, True):
        student = tiny_student("llama", layers=(0, 2))
        student.requires_grad_(False)
        for mixer in mixers(student).values():
            mixer.requires_grad_(True)
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        goal = objective(kind, checkpointing, student, teacher)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, metrics = goal(batch())
        kept = sum(saved.values())
        loss.backward()
        grads = [p.grad for p in student.parameters() if p.grad is not None]
        found.append((loss.detach(), metrics, grads, kept))
        if kind == "align":
            goal.close()
    plain, again = found
    torch.testing.assert_close(again[:3], plain[:3], rtol=1e-6, atol=1e-8)
    assert len(plain[2]) > 0
    assert again[3] < plain[3] / 2


def forbidden() -> None:
    raise AssertionError("a CUDA graph cannot read the state of a generator")


@pytest.mark.parametrize("kind", ["align", "hidden"])
def test_no_generator_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = tiny_teacher("llama").requires_grad_(False)
    student = tiny_student("llama", layers=(0, 2), mixer="gated_deltanet+window")
    goal = objective(kind, True, student, teacher)
    monkeypatch.setattr(torch, "get_rng_state", forbidden)
    goal(batch())[0].backward()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["align", "distil", "hidden"])
def test_states_of_the_teacher_are_kept_for_their_loss_only(kind: str) -> None:
    teacher, student = tiny_teacher("llama"), tiny_student("llama", layers=(0, 2))
    goal = objective(kind, False, student, teacher)
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        alive.append(sum(output() is not None for output in outputs))
        outputs.append(weakref.ref(output))

    for layer in decoder_layers(teacher):
        layer.register_forward_hook(look)
    goal(batch())
    assert len(alive) == len(decoder_layers(teacher)) > 2
    assert alive[-1] == (len(alive) - 1 if kind == "hidden" else 1)  # the input of the last layer


@torch.no_grad()
def test_states_are_left_out_of_the_result_on_request() -> None:
    model, rows = tiny_teacher("llama"), batch().rows
    runner = LayerRunner(model)
    entry = runner.embed(rows, document_boundaries(rows.position_ids))
    hidden, states = runner.run_layers(entry)
    without, none = runner.run_layers(entry, keep=False)
    assert torch.equal(hidden, without)
    assert (len(states), none) == (len(decoder_layers(model)), [])
