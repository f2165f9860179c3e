"""The untrained window + sinks baseline against attention computed by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.window import restrict_to_window
from support.tiny_models import tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))


def windowed(model_type: str, window: int = 5, sinks: int = 2) -> PreTrainedModel:
    return restrict_to_window(tiny_teacher(model_type), window, sinks)


@torch.no_grad()
def test_output_depends_on_window_and_sinks_only() -> None:
    """One layer: the last token must see exactly the last 5 tokens and the first 2."""
    model = restrict_to_window(tiny_teacher("llama", num_hidden_layers=1), 5, 2)
    ids = IDS[:1]
    reference = model(ids).logits[0, -1]
    for position in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 97
        moved = not torch.equal(model(changed).logits[0, -1], reference)
        assert moved == (position < 2 or position >= 24 - 5), position


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "qwen3"])
def test_equals_an_explicit_4d_mask(model_type: str) -> None:
    position = torch.arange(IDS.shape[1])
    distance = position[:, None] - position
    mask = (distance >= 0) & ((distance < 5) | (position < 2))
    ours = windowed(model_type)(IDS).logits
    if "gemma" in model_type:  # their own window of 8 hides the sinks from half of the layers
        local = mask & (distance < 8)
        plain = tiny_teacher(model_type)
        plain.set_attn_implementation("eager")
        masks = {"full_attention": mask, "sliding_attention": local}
        float_masks = {
            key: torch.zeros(2, 1, 24, 24).masked_fill(~value, torch.finfo(torch.float32).min)
            for key, value in masks.items()
        }
        torch.testing.assert_close(ours, plain(IDS, attention_mask=float_masks).logits, atol=2e-5, rtol=1e-4)
        return
    expected = tiny_teacher(model_type)(IDS, attention_mask=mask.expand(2, 1, 24, 24)).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_wide_window_changes_nothing() -> None:
    torch.testing.assert_close(windowed("llama", 24, 0)(IDS).logits, tiny_teacher("llama")(IDS).logits)


@torch.no_grad()
def test_generation_with_left_padding_equals_full_forward() -> None:
    model = windowed("llama")
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), IDS[:1, :12]], dim=1)
    batch = torch.cat([padded, IDS[1:, :18]])
    mask = torch.ones_like(batch)
    mask[0, :6] = 0
    generated = model.generate(
        batch, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    for row, start in ((0, 6), (1, 0)):
        ids = batch[row : row + 1, start:]
        for _ in range(10):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert generated[row, start:].tolist() == ids[0].tolist()


@torch.no_grad()
def test_hybrid_keeps_its_linear_layers() -> None:
    """Through a linear layer the last token still depends on tokens outside of the window."""
    model = restrict_to_window(tiny_student("llama", layers=(0, 2)), 5, 2)
    changed = IDS.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    assert not torch.equal(model(IDS).logits[0, -1], model(changed).logits[0, -1])


def test_impossible_window_is_refused() -> None:
    with pytest.raises(UserError, match="window must be >= 1"):
        windowed("llama", window=0)
