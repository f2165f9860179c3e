"""Padding is derived from the attention mask once per forward, and not at all where nothing is padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf.mixers.layer import masks
from support.read_in_parts import read_in_parts
from support.tiny_models import HYBRID, LAYERS, tiny_qwen3_5, tiny_student

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(TOKENS)
MASK[1, :5] = 0
# Keys that are offset behind their rotation: what a state holds then depends on where positions begin.
KINDS: list[dict[str, Any]] = [{"profile": "qwen3_5"}, {"k_offset": True}]


@pytest.fixture
def derivations(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor | None]:
    """Every result of `padded_tokens` that had a mask to look at."""
    found: list[torch.Tensor | None] = []
    derive = masks.padded_tokens

    def watch(mask: torch.Tensor | None, *args: Any) -> torch.Tensor | None:
        found.append(derive(mask, *args))
        return found[-1]

    monkeypatch.setattr(masks, "padded_tokens", watch)
    return found


def steps(model: PreTrainedModel, mask: torch.Tensor | None, cache: Any) -> torch.Tensor:
    """Logits of a prefill of ten tokens and two decoding steps."""
    logits = []
    for begin, end in ((0, 10), (10, 11), (11, 12)):
        part = {} if mask is None else {"attention_mask": mask[:, :end]}
        with torch.no_grad():
            logits.append(model(TOKENS[:, begin:end], past_key_values=cache, use_cache=True, **part).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_padded_batch_derives_its_padding_once_a_forward(
    kind: dict[str, Any], derivations: list[torch.Tensor | None]
) -> None:
    model = tiny_student("llama", layers=HYBRID, **kind)
    padded = steps(model, MASK, DynamicCache(config=model.config))
    assert [None if x is None else x.tolist() for x in derivations] == [
        (MASK[:, :10] == 0).tolist(),
        [[False], [False]],
        [[False], [False]],
    ]
    alone = model(TOKENS[1:, 5:]).logits
    torch.testing.assert_close(padded[1:, 5:], alone, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mask", [None, torch.ones_like(TOKENS)], ids=["no mask", "mask of ones"])
def test_nothing_padded_reaches_no_layer(mask: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_student("llama", "faithful")
    seen: list[Any] = []
    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
    steps(model, mask, DynamicCache(config=model.config))
    assert seen == [None] * (3 * LAYERS)


@pytest.mark.parametrize(("dims", "kind"), [(2, KINDS[0]), (4, KINDS[1])])
def test_the_masks_of_a_static_cache_are_read_at_the_tokens_seen(kind: dict[str, Any], dims: int) -> None:
    """Wider than what was seen, and handed over as 4D by whoever compiles."""
    model = tiny_student("qwen3", layers=HYBRID, **kind)
    wanted = steps(model, MASK, DynamicCache(config=model.config))
    wide = torch.cat([MASK, torch.zeros(2, 8, dtype=MASK.dtype)], dim=1)
    found = []
    cache = StaticCache(config=model.config, max_cache_len=20)
    for begin, end in ((0, 10), (10, 11), (11, 12)):
        rows = torch.arange(begin, end).view(1, 1, -1, 1)
        mask = wide if dims == 2 else (torch.arange(20) <= rows) & wide.bool()[:, None, None, :]
        with torch.no_grad():
            found.append(model(TOKENS[:, begin:end], attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(found, dim=1)[1:, 5:], wanted[1:, 5:], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(torch.cat(found, dim=1)[:1], wanted[:1], rtol=2e-4, atol=2e-4)


def test_a_mask_that_gives_no_positions_is_refused() -> None:
    model = tiny_student("mistral", layers=HYBRID)
    cache = model(TOKENS[:, :7], use_cache=True).past_key_values
    four = torch.ones(2, 1, 5, 12, dtype=torch.bool).tril(7)
    for mask, more in ((four, {"past_key_values": cache}), ({"sliding_attention": four}, {})):
        with pytest.raises(ValueError, match=r"^position_ids: cannot be read off this attention_mask"):
            model(TOKENS[:, 7:], attention_mask=mask, **more)


@torch.no_grad()
@pytest.mark.parametrize(
    ("profile", "changes", "parts"),
    [
        *(("faithful", {}, parts) for parts in ((12,), (5, 1, 1, 1, 1, 1, 2), (1,) * 12)),
        ("qwen3_5", {}, (1,) * 12),
        ("faithful", {"conv_on": "k", "conv_size": 2}, (5, 1, 1, 1, 1, 1, 2)),
        ("faithful", {"mixer": "deltaproduct", "conv_size": 3}, (5, 1, 1, 1, 1, 1, 2)),
    ],
    ids=str,
)
def test_padding_between_the_tokens_of_a_row_is_skipped(profile: str, changes: dict[str, Any], parts: Any) -> None:
    """Also by the short convolution, within a call and across calls, in prefills and decoding steps."""
    model = tiny_student("qwen3", profile, (1,), **changes)
    mask = torch.ones_like(TOKENS)
    mask[1, [0, 3, 4, 5, 8, 9, 11]] = 0
    cache = DynamicCache(config=model.config)
    logits = read_in_parts(model, TOKENS, parts, mask, cache)
    for row in range(2):
        real = mask[row].bool()
        torch.testing.assert_close(logits[row, real], model(TOKENS[row, real][None]).logits[0], rtol=2e-4, atol=2e-4)
    follows = {"attention_mask": torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)}
    follows["position_ids"] = follows["attention_mask"].cumsum(-1)[:, -1:] - 1
    after = model(TOKENS[:, :1], past_key_values=cache, use_cache=True, **follows).logits[1, -1]
    alone = torch.cat([TOKENS[1, mask[1].bool()], TOKENS[1, :1]])[None]
    torch.testing.assert_close(after, model(alone).logits[0, -1], rtol=2e-4, atol=2e-4)


def test_gradients_skip_padding_too() -> None:
    model = tiny_student("llama", "faithful", (1,))
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1]])
    real, row = mask[0].bool(), TOKENS[:1]
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    gradients = []
    for logits in (model(row, use_cache=False, **given).logits[:, real], model(row[:, real], use_cache=False).logits):
        model.zero_grad()
        logits.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.model.layers[1].parameters()])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_model_in_the_format_of_qwen3_5_reads_token_by_token(kind: Any) -> None:
    """transformers makes no mask for one token, and in static caches only where every layer says that it is one."""
    model = tiny_qwen3_5()
    mask = MASK if kind is DynamicCache else torch.ones_like(MASK)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = kind(config=model.config, **({} if kind is DynamicCache else {"max_cache_len": 16}))
    found = read_in_parts(model, TOKENS, [1] * TOKENS.shape[1], mask if kind is DynamicCache else None, cache)
    wanted = model(TOKENS, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=2e-4, atol=2e-4)
