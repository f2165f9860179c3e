"""A mixer's window by few kernels, without gradients; `WindowBranch` says what is computed."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from deltanet_hf.mixers.cache.packed_tokens import PackedTokens
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.layer.layer_call import LayerCall
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from deltanet_kernels import window_attention, window_keep, window_mixture, window_step_
from deltanet_kernels.window.calls import WindowCall, WindowKeepCall, WindowMixtureCall


def window_prefill(
    branch: WindowBranch,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: Tensor,
    gate: Tensor | None,
    norm: Any,
    call: LayerCall,
    prompt_length: Tensor | None,
) -> tuple[Tensor, State]:
    """As `WindowBranch.forward` of tokens without padding, with norm and gate of the state's output in one kernel.

    Args:
        x, q, k, v, call: as there.
        far: the state's output [B, T, HQ, D] before norm and gate.
        gate: logits of the output gate [B, T, HQ, D], or None for no gate.
        norm: the output norm, or None.
        prompt_length: as in `FastDecoder`.
    """
    numbers: Tensor | None = None
    new_state: State = {}
    if call.state is not None:
        tokens = branch.tokens(x, call)
        near, lse, new_state = branch.near(q, k, v, call, tokens)
        numbers = tokens.numbers
    elif branch.cache_bits < 16:
        held = PackedTokens(branch.kept, {}, None, keep_state=call.keep_state, prompt_length=prompt_length)
        near, lse = held.attend(q, k, v, branch.scale, branch.softcap)
        new_state = held.state
    else:
        window = WindowCall(q, k, v, branch.window, branch.sinks, branch.scale, None, branch.softcap)
        near, lse = window_attention.unchecked(window)
        if call.keep_state:
            kept = window_keep.unchecked(WindowKeepCall(k, v, branch.window, branch.sinks, prompt_length))
            new_state = dict(zip(branch.STATE, kept, strict=True))
    return mixture(branch, x, near, lse, far, numbers, gate, norm), new_state


def mixture(
    branch: WindowBranch,
    x: Tensor,
    near: Tensor,
    lse: Tensor,
    far: Tensor,
    numbers: Tensor | None,
    gate: Tensor | None = None,
    norm: Any = None,
) -> Tensor:
    """As `WindowBranch.mixture`, in one kernel; of `far` before its gate and norm where these are given.

    The numbers of tokens without padding that begin their sequences need not be given.
    """
    call = WindowMixtureCall(
        near,
        lse,
        far,
        branch.share_proj(x),
        branch.slopes.far_slope,
        branch.slopes.near_slope,
        branch.window + branch.sinks,
        branch.family_window,
        numbers,
        gate,
        None if norm is None else norm.weight,
        1e-6 if norm is None else norm.eps,
        branch.edge,
    )
    return window_mixture.unchecked(call)


class NearStep(NamedTuple):
    """The window's part of a step, for `mixture`."""

    output: Tensor  # [B, 1, HQ, D]
    lse: Tensor  # [B, 1, HQ] float32
    numbers: Tensor  # [B, 1], of the token, from 1


def window_step(
    branch: WindowBranch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: MixerCacheLayer,
    padding: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor | None,
) -> NearStep:
    """One more token of a window, whose part of the state changes in place: one kernel, three of 8 or 4 bits.

    Args:
        branch: the window.
        q, k, v: as for `WindowBranch.forward`, with T = 1, before the rotary embedding.
        cache: holds the layer's state before the token.
        padding: [B, 1] bool, True at padding, whose results are 0; None for no padding, and in 8 or 4 bits.
        cos, sin: of the rotary embedding, [B, 1, R] or [1, 1, R]; None for none.
        slots: [B] int32, the rows of the state that hold the sequences; None for those of the batch.
    """
    state = cache.state
    # `step` changes these tensors in place; only those of a cache that grows would be replaced in the dict.
    own = {name: state[name] for name in branch.state_names}
    if branch.cache_bits < 16:
        held = PackedTokens(branch.kept, own, None, in_place=True, slots=slots)
        output, lse = held.step(q, k, v, branch.scale, branch.softcap, cos, sin)
    else:
        output, lse = window_step_(
            q,
            k,
            v,
            branch.window,
            branch.sinks,
            **own,
            scale=branch.scale,
            padding=padding,
            softcap=branch.softcap,
            cos=cos,
            sin=sin,
            slots=slots,
        )
    numbers = state["count"] if slots is None else state["count"][slots]
    return NearStep(output, lse, numbers.unsqueeze(1))
