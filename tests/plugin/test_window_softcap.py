"""A window beside a state caps its scores as Gemma 2's attention does, in every form of the layer."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from deltanet_hf import converted_config
from deltanet_hf.models.factory import model_class
from support.read_in_parts import read_in_parts
from support.tiny_models import randomise, teacher_config, tiny_table, tiny_teacher

TOKENS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(8))
CAPS = [None, 1.0, 50.0]


def teacher(cap: float | None) -> PreTrainedModel:
    model = tiny_teacher("gemma2", attn_logit_softcapping=cap)
    model.set_attn_implementation("eager")  # SDPA ignores the cap
    return model


def student(cap: float | None) -> PreTrainedModel:
    """The teacher's weights under windows that see all that the teacher's attention sees."""
    config = teacher_config("gemma2", attn_logit_softcapping=cap)
    model = model_class("gemma2")(converted_config(config, tiny_table(window=32, expand_kv=False)))
    randomise(model, 1)
    model.load_state_dict(teacher(cap).state_dict(), strict=False)
    return model.eval()


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cap", CAPS)
def test_the_layer_is_the_teachers_attention(cap: float | None) -> None:
    close(student(cap)(TOKENS).logits, teacher(cap)(TOKENS).logits)


@torch.no_grad()
def test_the_cap_is_seen() -> None:
    """Otherwise the comparisons here would say nothing."""
    free, *capped = (student(cap)(TOKENS).logits for cap in CAPS)
    assert (capped[0] - free).norm() > 5e-2 * free.norm()
    assert (capped[1] - free).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cap", [1.0, 50.0])
def test_parts_of_a_prompt_and_decoding(cap: float, padded: bool) -> None:
    """A prefill, a second part that reads the cache, and single tokens, with and without padding on the left."""
    model = student(cap)
    mask = torch.ones_like(TOKENS)
    if padded:
        mask[1, :7] = 0
    logits = read_in_parts(model, TOKENS, [9, 3, *[1] * 8], mask if padded else None)
    close(logits[0], teacher(cap)(TOKENS[:1]).logits[0])
    first = 7 if padded else 0
    close(logits[1, first:], teacher(cap)(TOKENS[1:, first:]).logits[0])


def test_gradients_are_the_teachers() -> None:
    """Of the embeddings, through the scores of every layer."""
    grads = []
    for model in (student(1.0), teacher(1.0)):
        inputs = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
        logits = model(inputs_embeds=inputs, use_cache=False).logits
        upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
        grads.append(torch.autograd.grad(logits, inputs, upstream)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3 * float(grads[1].abs().max()))
