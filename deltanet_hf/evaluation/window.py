"""Sliding window + attention sinks, applied to any softmax model without training.

Every query sees the last `window` tokens (itself included) and the first `sinks` tokens of its own sequence
(Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023). It is the baseline that a linear
attention student has to beat: it also needs a constant amount of memory, and no training at all.

The restriction is a mask, so the results are exact, positions stay those of the unrestricted model, and padding,
caches and generation work as in transformers: the pair (attention function, mask function) is registered under a
name of its own with transformers' attention and mask interfaces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import and_masks, sdpa_mask

from deltanet_hf.errors import UserError

WINDOW = 64
SINKS = 4
SAVED = "softmax_window"  # config key of a model that was trained under the restriction


def restrict_to_window(model: PreTrainedModel, window: int = WINDOW, sinks: int = SINKS) -> PreTrainedModel:
    """Make every softmax layer of `model` attend to a window and the sinks only; returns the model, changed in place.

    Args:
        window: number of most recent tokens a query sees, itself included (>= 1).
        sinks: number of tokens at the start of each sequence (after any left padding) that all queries see (>= 0).

    Gated DeltaNet layers of a hybrid are not touched. Undo with `model.set_attn_implementation("sdpa")`.
    A family's own sliding window stays in force: tokens outside of both windows are not seen.
    """
    if window < 1 or sinks < 0:
        raise UserError(f"window must be >= 1 and sinks >= 0, got window={window}, sinks={sinks}")
    name = f"window_{window}_sinks_{sinks}"
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask_builder(window, sinks))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise UserError(f"{type(model).__name__}: its attention cannot be replaced, so the window baseline cannot run")
    return model


def train_under_window(model: PreTrainedModel, window: int = WINDOW, sinks: int = SINKS) -> PreTrainedModel:
    """Restrict a softmax model and note it in its config, so that `restricted_as_saved` finds it after saving."""
    setattr(model.config, SAVED, {"window": window, "sinks": sinks})
    return restrict_to_window(model, window, sinks)


def restricted_as_saved(model: PreTrainedModel) -> PreTrainedModel:
    """The model, restricted if it was trained so; a plain `from_pretrained` does not know the restriction."""
    saved = getattr(model.config, SAVED, None)
    return model if saved is None else restrict_to_window(model, saved["window"], saved["sinks"])


def _mask_builder(window: int, sinks: int) -> Callable[..., Tensor]:
    def build(*, mask_function: Callable, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """[B, 1, Tq, Tkv] boolean mask; `attention_mask` is the 2D padding mask [B, Tkv] or None."""

        def keep(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Left padding moves the sinks: they are the first real tokens of each row.
            start = 0 if attention_mask is None else attention_mask.bool().int().argmax(dim=1)[batch]
            return (query < key + window) | (key < start + sinks)

        # Without the full mask SDPA would fall back to plain causal attention.
        kwargs["allow_is_causal_skip"] = False
        mask = sdpa_mask(mask_function=and_masks(mask_function, keep), attention_mask=attention_mask, **kwargs)
        assert mask is not None
        return mask.contiguous()  # it may be one row's, expanded, which compiled code would take for another kind

    return build


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA under the mask; query [B, HQ, Tq, D], key and value [B, H, Tkv, D] -> [B, Tq, HQ, D].

    Capped scores (Gemma 2) have no SDPA form and are computed plainly.
    """
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, repeat_kv(key, groups).transpose(2, 3)).float() * scale
    scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    output = torch.matmul(scores.softmax(dim=-1).to(value.dtype), repeat_kv(value, groups))
    return output.transpose(1, 2).contiguous(), None
