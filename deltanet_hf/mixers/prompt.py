"""The elementwise work between a layer's projections and its recurrence: in one kernel, or by separate operations.

A layer of a small model is computed faster than its operations are launched, so that prompts, in one part or several,
take one kernel. Training, compiled models and the layers that are excluded here keep the separate operations. So does
whoever put something around a part: it is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_hf.mixers.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.parts import KeyOffset, ShortConv, is_plain
from deltanet_hf.mixers.state import State
from deltanet_kernels import prompt_inputs
from deltanet_kernels.prompt.calls import PromptInputs, PromptInputsCall
from deltanet_kernels.prompt.checks import check_prompt_inputs


class ReadsPrompts(Protocol):
    """The parts of a `Mixer` that lie between its projections and its recurrence."""

    head_dim: int
    kv_repeats: int
    settings: Any
    k_proj: nn.Linear
    conv1d: ShortConv | None
    k_offset: KeyOffset | None
    window_branch: Any

    @property
    def rotates(self) -> bool: ...

    def repeated(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def rotated(
        self, q: Tensor, k: Tensor, v: Tensor, position_embeddings: PositionEmbeddings | None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Projected(NamedTuple):
    """All that a layer computes from its input alone."""

    parts: tuple[Tensor, Tensor, Tensor]
    """q, k, v [B, T, heads*D] of `Mixer.project`."""
    gates: tuple[Tensor, ...]
    """Of `Mixer.gates`."""
    output_gate: Tensor | None
    """Its logits [B, T, H, D]."""
    share: Tensor | None = None
    """Logits [B, T, H] of the share of a window beside the state; None where the window computes them."""


def without_gradients() -> bool:
    """Whether a call may take operators that have no gradients; a compiler joins the separate ones itself."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def takes_one_kernel(mixer: ReadsPrompts, padding: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Whether `inputs_in_one_kernel` computes what lies between the projections of a call and its recurrence."""
    if not without_gradients() or padding is not None or cu_seqlens is not None:
        return False
    conv, offset = mixer.conv1d, mixer.k_offset
    if conv is not None and (mixer.settings.conv_on == "k" or not is_plain(conv)):
        return False
    return offset is None or is_plain(offset)


def inputs_in_one_kernel(
    mixer: ReadsPrompts,
    parts: tuple[Tensor, Tensor, Tensor],
    position_embeddings: PositionEmbeddings | None,
    state: State | None,
    keep_state: bool,
) -> PromptInputs:
    """The inputs of the recurrence and the window, from the outputs [B, T, heads*D] of `mixer.project`."""
    cos = sin = None
    if mixer.rotates:  # every family's `apply_rotary_pos_emb` turns the halves of the leading channels
        assert position_embeddings is not None
        cos, sin = position_embeddings
    conv, offset, branch, settings = mixer.conv1d, mixer.k_offset, mixer.window_branch, mixer.settings
    qk_silu = settings.qk_activation == "silu"
    beside_window, own_heads = branch is not None, mixer.k_proj.out_features // mixer.head_dim
    # Whether the state and the window read different queries and keys.
    differ = conv is not None or offset is not None or qk_silu or mixer.kv_repeats > 1
    call = PromptInputsCall(
        *parts,
        mixer.head_dim,
        None if conv is None else conv.weight.squeeze(1),
        None if conv is None or state is None else state["conv_tail"],
        cos,
        sin,
        None if offset is None else offset.weight,
        qk_silu,
        settings.v_activation == "silu",
        own_heads if beside_window and differ else 0,
        conv is not None and keep_state,
        mixer.kv_repeats,
    )
    # The state comes with the cache and the rotation with the call: from elsewhere than the layer.
    if state is not None or not _rotates(parts[0], cos, sin, mixer.head_dim):
        check_prompt_inputs(call)
    inputs = prompt_inputs.unchecked(call)
    if beside_window and not differ:
        inputs = inputs._replace(window_q=inputs.q, window_k=inputs.k[:, :, -own_heads:])
    return inputs


def _rotates(q: Tensor, cos: Tensor | None, sin: Tensor | None, head_dim: int) -> bool:
    """Whether the tokens of q [B, T, heads * head_dim], at least one, fit the rotary embedding, if there is one."""
    if 0 in q.shape or cos is None or sin is None:
        return cos is sin and 0 not in q.shape
    if cos.dim() != 3 or cos.shape != sin.shape or not cos.device == sin.device == q.device:
        return False
    rows, tokens, turned = cos.shape
    fits = rows in (1, q.shape[0]) and tokens == q.shape[1] and 0 < turned <= head_dim and turned % 2 == 0
    return fits and cos.is_floating_point() and sin.is_floating_point()


def separate_inputs(
    mixer: ReadsPrompts,
    parts: tuple[Tensor, Tensor, Tensor],
    position_embeddings: PositionEmbeddings | None,
    padding: Tensor | None,
    state: State | None,
    keep_state: bool,
    cu_seqlens: Tensor | None,
) -> PromptInputs:
    """As `inputs_in_one_kernel`, by differentiable operations and without the inputs of the window."""
    (q, k, v), conv_tail, settings = mixer.repeated(*parts), None, mixer.settings
    if mixer.conv1d is not None:
        tail = None if state is None else state["conv_tail"]
        if settings.conv_on == "k":
            (k,), conv_tail = mixer.conv1d((k,), padding, tail, keep_state, cu_seqlens)
        else:
            (q, k, v), conv_tail = mixer.conv1d((q, k, v), padding, tail, keep_state, cu_seqlens)
    q, k, v = mixer.rotated(q, k, v, position_embeddings)
    if mixer.k_offset is not None:
        k = mixer.k_offset(k)
    if settings.qk_activation == "silu":
        q, k = F.silu(q), F.silu(k)
    if settings.v_activation == "silu":
        v = F.silu(v)
    return PromptInputs(q, k, v, None, None, conv_tail)
