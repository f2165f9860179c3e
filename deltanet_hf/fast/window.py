"""A mixer's window by few kernels, without gradients; `WindowBranch` says what is computed."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.layer_call import LayerCall
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from deltanet_kernels import window_attention, window_keep, window_mixture, window_step_
from deltanet_kernels.window.calls import WindowCall, WindowKeepCall, WindowMixtureCall


class WindowOutput(NamedTuple):
    """The attention in a window, for `mixture`."""

    output: Tensor  # [B, T, HQ, D]
    lse: Tensor  # [B, T, HQ] float32
    numbers: Tensor | None  # [B, T] or [1, T], of the tokens, from 1; None for 1, 2, 3, ... in each row


def window_attended(
    branch: WindowBranch, q: Tensor, k: Tensor, v: Tensor, call: LayerCall
) -> tuple[WindowOutput, State]:
    """As `WindowBranch.window_output`, of q, k, v [B, T, heads, D]: a first prompt without padding by one kernel, and
    its cache.

    With `prompt_length`, it keeps what is in the window after as many tokens.
    """
    further = call.state is not None or call.padding is not None or call.cu_seqlens is not None
    if further or branch.learned_sinks is not None:
        tokens = branch.tokens(q, call)
        window_output, lse, state = branch.window_output(q, k, v, call, tokens)
        return WindowOutput(window_output, lse, tokens.numbers), state
    if branch.cache_bits < 16:
        held = QuantisedKVCache(
            branch.cache_spec, {}, None, keep_state=call.keep_state, prompt_length=call.prompt_length
        )
        return WindowOutput(*held.attend(q, k, v, branch.scale, branch.softcap), None), held.state
    window = WindowCall(q, k, v, branch.window, branch.sinks, branch.scale, None, branch.softcap)
    window_output, lse = window_attention.unchecked(window)
    if not call.keep_state:
        return WindowOutput(window_output, lse, None), {}
    kept = window_keep.unchecked(WindowKeepCall(k, v, branch.window, branch.sinks, call.prompt_length))
    return WindowOutput(window_output, lse, None), dict(zip(branch.STATE, kept, strict=True))


def mixture(
    branch: WindowBranch,
    logits: Tensor,
    window_output: WindowOutput,
    state_output: Tensor,
    gate: Tensor | None = None,
    norm: Any = None,
) -> Tensor:
    """As `WindowBranch.mixture`, in one kernel.

    Args:
        logits: as there.
        state_output: of the last tokens; 0 for those before, as in `window_mixture`.
        gate, norm: the logits of the output gate [B, T, HQ, D] and the output norm, where `state_output` comes before
            them.
    """
    call = WindowMixtureCall(
        window_output.output,
        window_output.lse,
        state_output,
        logits,
        branch.slopes.far_slope,
        branch.slopes.near_slope,
        branch.window + branch.sinks,
        branch.family_window,
        window_output.numbers,
        gate,
        None if norm is None else norm.weight,
        1e-6 if norm is None else norm.eps,
        branch.edge,
    )
    return window_mixture.unchecked(call)


def window_step(
    branch: WindowBranch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    padding: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    state_indices: Tensor | None,
) -> WindowOutput:
    """One more token of a window, whose part of the state changes in place: one kernel, three of 8 or 4 bits.

    Args:
        branch: the window.
        q, k, v: as for `WindowBranch.forward`, with T = 1, before the rotary embedding.
        state: the layer's state before the token.
        padding: [B, 1] bool, True at padding, whose results are 0; None for no padding, and in 8 or 4 bits.
        cos, sin: of the rotary embedding, [B, 1, R] or [1, 1, R]; None for none.
        state_indices: [B] int32, the rows of the state that hold the sequences; None for those of the batch.
    """
    # `step` changes these tensors in place; only those of a cache that grows would be replaced in the dict.
    own = {name: state[name] for name in branch.state_names}
    if branch.cache_bits < 16:
        held = QuantisedKVCache(branch.cache_spec, own, None, in_place=True, state_indices=state_indices)
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
            state_indices=state_indices,
        )
    numbers = state["count"] if state_indices is None else state["count"][state_indices]
    return WindowOutput(output, lse, numbers.unsqueeze(1))
