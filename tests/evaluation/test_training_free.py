"""Free policies of equal bytes: the longest window within them, and blind beyond it."""

from __future__ import annotations

import pytest
import torch

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from deltanet_hf.evaluation.training_free import longest_window, with_windows
from deltanet_hf.models.restrict import restrict_to_window
from support.tiny_models import LAYERS, mixture_table, tiny_mixture, tiny_student, tiny_teacher

TOKENS = 96
KEY_VALUE = 2 * 2 * 8 * 4  # keys and values, heads, head size, float32


def test_measured_bytes_are_those_of_the_plan() -> None:
    assert sequence_bytes(tiny_teacher("llama"), TOKENS) == LAYERS * KEY_VALUE * TOKENS
    student = tiny_student("llama", layers=(0, 2))
    states = sum(student.model.layers[i].self_attn.state_bytes(torch.float32) for i in (0, 2))
    assert sequence_bytes(student, TOKENS) == states + 2 * KEY_VALUE * TOKENS
    assert sequence_bytes(student, 10) == states + 2 * KEY_VALUE * 10
    mixture = tiny_mixture("llama", mixture_table())
    states = sum(mixture.model.layers[i].self_attn.state_bytes(torch.float32) for i in (0, 2, 3))
    assert sequence_bytes(mixture, TOKENS) == states + KEY_VALUE * TOKENS


@pytest.mark.parametrize("kept", [(), (1,), (0, 3)])
def test_the_window_is_the_longest_within_the_bytes(kept: tuple[int, ...]) -> None:
    teacher = tiny_teacher("llama")
    whole, others = len(kept) * KEY_VALUE * TOKENS, LAYERS - len(kept)
    for window in (1, 17):
        budget = whole + others * (window + 4) * KEY_VALUE
        for more, expected in ((-1, window - 1), (0, window), (1, window)):
            assert longest_window(teacher, kept, budget + more, TOKENS, 16) == (expected or None)
    assert longest_window(teacher, kept, 10**9, TOKENS, 16) == TOKENS


def test_without_a_window_it_is_the_teacher() -> None:
    teacher, ids = tiny_teacher("llama"), torch.arange(3, 60)[None]
    assert torch.equal(with_windows(teacher, (), None)(ids).logits, teacher(ids).logits)


@torch.no_grad()
def test_policies_leave_the_teacher_alone_and_restrict_only_the_others() -> None:
    teacher = tiny_teacher("llama")
    ids = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(0))
    before = teacher(ids).logits
    policy = with_windows(teacher, (1, 2), 3, 1)
    assert torch.equal(teacher(ids).logits, before)
    assert not torch.allclose(policy(ids).logits, before, atol=1e-3)
    kinds = [type(layer.self_attn).__name__.startswith("Window") for layer in policy.model.layers]
    assert kinds == [True, False, False, True]
    blind = with_windows(teacher, (), 3, 0)
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 97
    far = LAYERS * 2 + 1  # tokens that the first one can reach through windows of 3
    assert torch.equal(blind(ids).logits[:, far:], blind(changed).logits[:, far:])
    assert not torch.equal(policy(ids).logits[:, far:], policy(changed).logits[:, far:])


def test_a_familys_own_window_is_not_made_larger() -> None:
    teacher = tiny_teacher("gemma2")  # layers 0 and 2 see 8 tokens
    full = sequence_bytes(with_windows(teacher, (), 50), TOKENS)
    own = sequence_bytes(restrict_to_window(tiny_teacher("gemma2"), 50), TOKENS)
    assert full < own


def test_windows_on_chosen_layers_only() -> None:
    model = restrict_to_window(tiny_teacher("llama"), 5, 2, layers=[2])
    assert [type(layer.self_attn).__name__ for layer in model.model.layers].count("WindowLlamaAttention") == 1
    with pytest.raises(UserError, match="no softmax attention"):
        restrict_to_window(tiny_teacher("llama"), 5, 2, layers=[])
