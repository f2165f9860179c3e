"""The calls of a prompt's elementwise work: the arguments of each operator, as one typed object; and their checks."""

from typing import NamedTuple

import torch

from deltanet_kernels.checks import check_rotation, check_tensors, refuse_gradients, require_least, shape_text


class PromptInputsCall(NamedTuple):
    """q, k and v of a recurrent state, and q and k of a window beside it, from a layer's projections of T tokens.

        q, k, v = act(rope(conv(q|k|v)) - offset);  window_q, window_k = rope(q), rope(k)

    v has no rotation, and only k an offset. On CUDA this is one kernel, float32 inside. No gradients.

    Args:
        q, k, v: [B, T, HQ*D], [B, T, HK*D], [B, T, HV*D] in one dtype; T >= 1. They may be slices of one tensor.
        head_dim: D.
        conv_weight: [C, W] over the C channels of q|k|v, k and v repeated, the last column on the current token; None
            for no convolution.
        conv_tail: the W-1 inputs before the first token, oldest first [B, C, W-1]; zeros by default.
        cos, sin: [B, T, R] or [1, T, R], R even and <= D: the first R channels of each head of q and k are rotated,
            channel i < R/2 against channel i + R/2; None for no rotation.
        k_offset: [H, D], subtracted from the keys between rotation and activation; key head j has row j % H.
        qk_silu, v_silu: apply SiLU to q and k, and to v.
        window_heads: number of last heads of k that the window reads; 0 for no window.
        output_tail: also return the last W-1 inputs.
        kv_repeats: number of states that read each head of k and v; state j reads head j // kv_repeats. Each has
            channels of the convolution of its own.

    Returns:
        q [B, T, HQ, D], k and v [B, T, heads * kv_repeats, D] and, with `window_heads`, window_q [B, T, HQ, D] and
        window_k [B, T, window_heads, D] in the dtype of q; the new tail [B, C, W-1] in that dtype. None for what is not
        wanted; v is a view of the argument where nothing changes it.

    Raises:
        ValueError: shapes, devices or numbers of heads that do not fit, T = 0, a tail without a convolution, or
            gradients are required.
        TypeError: dtypes that do not fit.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    head_dim: int
    conv_weight: torch.Tensor | None = None
    conv_tail: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    k_offset: torch.Tensor | None = None
    qk_silu: bool = False
    v_silu: bool = False
    window_heads: int = 0
    output_tail: bool = False
    kv_repeats: int = 1


class PromptInputs(NamedTuple):
    """The results of `prompt_inputs`, which documents them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window_q: torch.Tensor | None
    window_k: torch.Tensor | None
    tail: torch.Tensor | None


class GateValuesCall(NamedTuple):
    """Log decay and write strength of the gated delta rule from their logits; one kernel on CUDA. No gradients.

        g = -exp(A_log) softplus(a + dt_bias);  beta = limit sigmoid(b)

    Args:
        a, b: [B, T, H].
        A_log, dt_bias: [H].
        limit: the greatest strength, 1 or 2.

    Returns:
        g and beta [B, T, H] float32.

    Raises:
        ValueError: shapes, devices or a limit that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """

    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    limit: int = 1


def check_prompt_inputs(call: PromptInputsCall) -> None:
    """Check the arguments of `prompt_inputs`; raises ValueError or TypeError."""
    D, repeats = call.head_dim, call.kv_repeats
    require_least("head_dim", D, 1)
    require_least("kv_repeats", repeats, 1)
    projections = {"q": "B T CQ", "k": "B T CK", "v": "B T CV"}
    sizes = check_tensors(call, projections, same=("k", "v"))
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if x.shape[2] % D:
            raise ValueError(f"{name}: got shape {shape_text(x)}, needs [B, T, heads * {D}]")
    sizes |= {"C": sizes["CQ"] + (sizes["CK"] + sizes["CV"]) * repeats, "D": D}
    if call.conv_weight is None and (call.conv_tail is not None or call.output_tail):
        raise ValueError("conv_weight: got None, needs the taps of the convolution whose tail is given or wanted")
    sizes = check_tensors(call, {"q": "B T CQ", "conv_weight?": "C W", "k_offset?": "H D"}, sizes)
    check_tensors(call, {"q": "B T CQ", "conv_tail?": "B C W-1"}, {**sizes, "W-1": sizes.get("W", 1) - 1})
    check_rotation(call.cos, call.sin, sizes["B"], sizes["T"], D, call.q.device)
    own_heads = sizes["CK"] // D
    if own_heads * repeats % sizes.get("H", 1):
        raise ValueError(f"k_offset: got {sizes['H']} heads, needs a divisor of the {own_heads * repeats} heads of k")
    require_least("window_heads", call.window_heads, 0)
    if call.window_heads > own_heads:
        raise ValueError(f"window_heads: got {call.window_heads}, needs at most {own_heads}, the heads of k")
    tensors = call.q, call.k, call.v, call.conv_weight, call.conv_tail, call.k_offset
    refuse_gradients("prompt_inputs", "causal_conv1d", *tensors)


def check_gate_values(call: GateValuesCall) -> None:
    """Check the arguments of `gate_values`; raises ValueError or TypeError."""
    check_tensors(call, {"a": "B T H", "b": "B T H", "A_log": "H", "dt_bias": "H"})
    if call.limit not in (1, 2):
        raise ValueError(f"limit: got {call.limit!r}, needs 1 or 2")
    refuse_gradients("gate_values", "the gates of chunk_gated_delta_rule", *call[:4])
