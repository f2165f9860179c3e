"""Where padding lies and where packed sequences begin, read off the arguments that transformers passes down."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from deltanet_hf.mixers.cache.argument import cache_in
from deltanet_hf.model_types import UNPACKABLE, family_type
from deltanet_kernels.common.registration import is_observed

NO_PADDING = False
"""As `padding` of a call: it has none, whatever its mask says of the keys."""


def padded_tokens(attention_mask: torch.Tensor | None, length: int, seen: int | torch.Tensor) -> torch.Tensor | None:
    """[B, T] bool, True at padding, for the last `length` positions; None when nothing is padded.

    Args:
        attention_mask: None; 2D [B, S] (1 for a real token); 4D [B, 1, T, S] bool (True: may attend) or float (0: may
            attend), where a token is real if it may attend to itself.
        length: T, the number of tokens in this forward.
        seen: tokens in the cache before this forward.

    Raises:
        ValueError: a mask of another kind or shape.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention_mask: got {type(attention_mask).__name__}, which converted layers cannot read; "
            'load the model with attn_implementation="sdpa" or "eager"'
        )
    if attention_mask.dim() == 2:
        return attention_mask[:, -length:] == 0
    if attention_mask.dim() != 4:
        raise ValueError(f"attention_mask: got shape {tuple(attention_mask.shape)}, expected [B, S] or [B, 1, T, S]")
    own = _own_columns(attention_mask, length, seen)
    diagonal = attention_mask[:, 0].gather(-1, own.view(1, -1, 1).expand(attention_mask.shape[0], -1, 1))
    return ~visible(diagonal.squeeze(-1))


def visible(mask: torch.Tensor) -> torch.Tensor:
    """A mask as bool, True where a query may see a key."""
    return mask if mask.dtype == torch.bool else mask > -1.0


def positions_in(
    attention_mask: object, padding: torch.Tensor | None, length: int, seen: int | torch.Tensor, window: int | None
) -> torch.Tensor:
    """[B, T] int64 positions of the last `length` tokens: how many tokens that are no padding stand before each.

    Softmax attention does not see where positions begin, because its rotary embedding is relative; an offset of rotated
    keys and an activation of them do.

    Args:
        attention_mask, seen: as for `padded_tokens`.
        padding: of a 4D mask.
        window: the family's sliding window.

    Raises:
        ValueError: a mask that does not say where the tokens in the cache begin, or one per kind of layer.
    """
    begins = isinstance(seen, int) and seen == 0
    if isinstance(attention_mask, torch.Tensor):
        if attention_mask.dim() == 2:
            counts = (attention_mask != 0).cumsum(-1)[:, _own_columns(attention_mask, length, seen)]
            return (counts - 1).clamp(min=0)
        if begins and padding is not None:
            return ((~padding).cumsum(-1) - 1).clamp(min=0)
        if window is None:  # causal order: a token sees all before it
            return (visible(attention_mask)[:, 0].sum(-1) - 1).clamp(min=0)
    raise ValueError("position_ids: cannot be read off this attention_mask; pass them with it, or a mask [B, S]")


def sliding_window(config: PreTrainedConfig, layer: int) -> int | None:
    """Tokens that a layer's softmax attention sees in the family's own sliding window; None for all."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is None or (types is not None and types[layer] != "sliding_attention"):
        return None
    return int(window)


def boundaries_in(cu_seq_lens_q: torch.Tensor | None, length: int, cache: object | None) -> torch.Tensor | None:
    """The boundaries of the packed sequences in one layer's call of `length` tokens; None for one sequence per row.

    Raises:
        ValueError: packed sequences together with a cache that does not know their lengths.
    """
    boundaries = cu_seq_lens_q if length > 1 else None
    if boundaries is not None and cache is not None and getattr(cache, "lengths", None) is None:
        raise ValueError("cu_seq_lens_q: packed sequences leave no state to continue from; pass use_cache=False")
    return boundaries


def padding_in(
    attention_mask: torch.Tensor | None,
    padding: torch.Tensor | Literal[False] | None,
    length: int,
    seen: int | torch.Tensor,
) -> torch.Tensor | None:
    """The padding of one layer's call: what `announce_padding` found if it did, else what the layer's mask says.

    transformers drops a mask that masks nothing, and then nothing is padded; nor is with `NO_PADDING`.
    """
    if attention_mask is None or padding is False:
        return None
    return padded_tokens(attention_mask, length, seen) if padding is None else padding


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Boundaries of the sequences packed into rows whose positions restart; None if no row restarts.

    Args:
        position_ids: [B, T] integers.

    Returns:
        [N + 1] int32 boundaries over the B*T tokens of the flattened rows, where every row begins a new sequence.
    """
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if position_ids.shape[1] < 2 or not bool(restarts.any()):
        return None
    begins = torch.cat([torch.ones_like(restarts[:, :1]), restarts], dim=1).flatten()
    starts = begins.nonzero().flatten().to(torch.int32)
    return torch.cat([starts, starts.new_tensor([position_ids.numel()])])


def inputs_in(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids [B, T] or embeddings [B, T, hidden] among the arguments of a decoder's call."""
    named = (kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    return next(named, args[0] if args else None)


def announce_packing(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: tell every layer about packed rows, once per forward.

    Positions that restart inside a row become `cu_seq_lens_q`. The other way round, `cu_seq_lens_q` becomes positions
    that restart, from which transformers builds the mask of softmax layers (it does so only without a cache).

    Raises:
        ValueError: packed rows in a family for which transformers builds no such mask, or with another mask.
    """
    position_ids, cu_seqlens = kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q")
    inputs: Any = inputs_in(args, kwargs)
    if cu_seqlens is not None and kwargs.get("attention_mask") is not None:
        raise ValueError(
            "attention_mask: got one beside cu_seq_lens_q, with which softmax layers do not keep packed sequences "
            "apart; leave the mask out, and give padding boundaries of its own"
        )
    if position_ids is None and cu_seqlens is not None:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        sequence = torch.searchsorted(cu_seqlens.to(positions), positions, right=True) - 1
        kwargs["position_ids"] = (positions - cu_seqlens.to(positions)[sequence]).unsqueeze(0)
    elif (
        cu_seqlens is None
        and kwargs.get("attention_mask") is None
        and position_ids is not None
        and position_ids.dim() == 2
        and position_ids.shape[1] > 1
    ):
        rows = len(position_ids) if inputs is None else len(inputs)
        found = cu_seqlens_of(position_ids.expand(rows, -1))  # one row of positions may stand for all
        if found is not None:
            kwargs["cu_seq_lens_q"] = found
    if kwargs.get("cu_seq_lens_q") is not None:
        config: Any = module.config
        if (family := family_type(config)) in UNPACKABLE:
            raise ValueError(
                f"packed sequences: softmax attention of {family} does not keep them apart; pad them instead"
            )
        kwargs["use_cache"] = False
    return args, kwargs


def announce_padding(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of the decoder: read the padding off the caller's mask once instead of in every layer.

    The layers get it as `padding` and use it where they also get a mask (`padding_in`). Where it is not known here
    which columns of the mask belong to this forward, the layers read the mask that transformers makes of it. Where the
    caller gives no positions, they count the tokens that are no padding (`positions_in`).
    """
    if kwargs.get("padding") is NO_PADDING:
        return args, kwargs
    mask, cache = kwargs.get("attention_mask"), cache_in(kwargs)
    inputs = inputs_in(args, kwargs)
    if inputs is None:
        return args, kwargs
    length, seen = inputs.shape[1], 0 if cache is None else cache.get_seq_length()
    whole = isinstance(seen, int) and getattr(mask, "shape", ())[1:] == (seen + length,)  # a column per token
    if isinstance(mask, torch.Tensor) and (mask.dim() == 4 or whole):
        mask = mask.to(inputs.device)
        kwargs["padding"] = padded_tokens(mask, length, seen)
        if mask.dim() == 4 and length > 1:
            _check_order(mask, kwargs["padding"], seen, getattr(module.config, "sliding_window", None))
    if mask is not None and kwargs.get("position_ids") is None:
        window = getattr(module.config, "sliding_window", None)
        kwargs["position_ids"] = positions_in(mask, kwargs.get("padding"), length, seen, window)
    # transformers makes a mask of what follows a cache, and of a sliding window, even if nothing is padded.
    follows = isinstance(seen, int) and seen > 0
    if length > 1 and (mask is None or (follows and _is_known_whole(kwargs.get("padding")))):
        kwargs["padding"] = NO_PADDING
    return args, kwargs


def _is_known_whole(padding: torch.Tensor | None) -> bool:
    """Whether nothing is padding, where that may be read: once in a call, as transformers does in a first call."""
    if padding is None or padding.is_meta or is_observed() or _recording(padding):
        return False
    return not bool(padding.any())


def _check_order(
    mask: torch.Tensor, padding: torch.Tensor | None, seen: int | torch.Tensor, window: int | None
) -> None:
    """Raises ValueError if a 4D mask has more than causal order, padding and the family's window: states have no more.

    A key is real if a real token sees it. Compiled and recorded calls are not checked.
    """
    if padding is None or torch.compiler.is_compiling() or mask.is_meta or _recording(mask):
        return
    seeing = visible(mask)
    real = ~padding[:, None, :, None]
    keys = (seeing & real).any(dim=2, keepdim=True)
    columns = torch.arange(mask.shape[-1], device=mask.device)
    own = _own_columns(mask, mask.shape[2], seen)[:, None]
    orders = [columns <= own]
    if window is not None:
        orders.append(orders[0] & (columns > own - window))
    if not any(bool(((seeing == (order & keys)) | ~real).all()) for order in orders):
        raise ValueError(
            "attention_mask: this 4D mask hides or shows more than causal order and padding do, which converted layers "
            "cannot follow; for packed rows pass position_ids that restart, or cu_seq_lens_q, without a mask"
        )


def _recording(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _own_columns(mask: torch.Tensor, length: int, seen: int | torch.Tensor) -> torch.Tensor:
    """[T] the columns of a 4D mask in which the last `length` tokens stand themselves."""
    first = mask.shape[-1] - length
    # Static caches are wider than what was seen; sliding ones are narrower.
    offset = first if isinstance(seen, int) and seen >= first else torch.as_tensor(seen).clamp(max=first)
    return torch.arange(length, device=mask.device) + offset
