"""4D masks of the caller: those that a state can follow are read, all others are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deltanet_hf.models.restrict import restrict_to_window
from support.tiny_models import HYBRID, tiny_student, tiny_teacher

T = 12
TOKENS = torch.randint(3, 97, (2, T), generator=torch.Generator().manual_seed(2))
PADDING = torch.ones_like(TOKENS)
PADDING[1, :5] = 0
CAUSAL = torch.ones(2, 1, T, T, dtype=torch.bool).tril()


def _blocks() -> Tensor:
    mask = CAUSAL.clone()
    mask[:, :, 6:, :6] = False
    return mask


def _prefix() -> Tensor:
    mask = CAUSAL.clone()
    mask[:, :, :4, :4] = True
    return mask


def _hole() -> Tensor:
    mask = CAUSAL.clone()
    mask[:, :, 5:, 3] = False
    return mask


def _one_head() -> Tensor:
    mask = CAUSAL.repeat(1, 2, 1, 1)
    mask[:, 1, 8:, 2] = False
    return mask


@pytest.mark.parametrize(
    ("make", "as_float"), [(_blocks, False), (_prefix, True), (_hole, False), (_one_head, True), (_blocks, True)]
)
def test_more_than_causal_order_is_refused(make: Callable[[], Tensor], as_float: bool) -> None:
    mask = make()
    if as_float:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    windowed = restrict_to_window(tiny_teacher("llama"), 4, 1)
    for model in (tiny_student("llama"), tiny_student("llama", layers=HYBRID), windowed):
        with pytest.raises(ValueError, match=r"^attention_mask: this 4D mask .* pass position_ids that restart"):
            model(TOKENS, attention_mask=mask)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("unmasked", [False, True], ids=["padding sees nothing", "padding sees all"])
@torch.no_grad()
def test_causal_order_with_padding_is_followed(model_type: str, unmasked: bool) -> None:
    model = tiny_student(model_type, layers=HYBRID)
    real = PADDING.bool()
    mask = CAUSAL & real[:, None, None, :]
    if unmasked:
        mask = mask | ~real[:, None, :, None]
        mask[1, 0, :5, :5].fill_diagonal_(False)
    if model_type == "mistral":
        window = model.config.sliding_window
        mask &= torch.ones(T, T, dtype=torch.bool).triu(1 - window)
    got = model(TOKENS, attention_mask=mask).logits
    torch.testing.assert_close(got[real], model(TOKENS, attention_mask=PADDING).logits[real])


@torch.no_grad()
def test_causal_order_of_the_second_half_is_followed() -> None:
    model = tiny_student("llama", layers=HYBRID)
    whole = model(TOKENS).logits
    cache = model(TOKENS[:, :7], use_cache=True).past_key_values
    rest = model(TOKENS[:, 7:], attention_mask=CAUSAL[:, :, 7:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 7:], rtol=1e-4, atol=1e-4)
