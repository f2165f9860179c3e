"""Argument checks of the operators of a prompt. Messages name the argument, what it is and what it needs."""

from deltanet_kernels.checks import (
    check_rotation,
    refuse_gradients,
    require_input,
    require_least,
    require_shape,
    shape_text,
)
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputsCall


def check_prompt_inputs(call: PromptInputsCall) -> None:
    """Check the arguments of `prompt_inputs`; raises ValueError or TypeError."""
    q, k, v, D, weight, tail, cos, sin, offset, _, _, window_heads, output_tail, kv_repeats = call
    require_least("head_dim", D, 1)
    require_least("kv_repeats", kv_repeats, 1)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_input(name, x, "q", q)
        if x.dim() != 3 or 0 in x.shape or x.shape[:2] != q.shape[:2] or x.shape[2] % D:
            raise ValueError(f"{name}: got shape {shape_text(x)}, needs [B, T, heads * {D}] with B and T of q, T >= 1")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    B, T, C = q.shape[0], q.shape[1], q.shape[2] + (k.shape[2] + v.shape[2]) * kv_repeats
    own_heads = k.shape[2] // D
    key_heads = own_heads * kv_repeats
    if weight is None:
        if tail is not None or output_tail:
            raise ValueError("conv_weight: got None, needs the taps of the convolution whose tail is given or wanted")
    else:
        require_input("conv_weight", weight, "q", q)
        if weight.dim() != 2 or weight.shape[0] != C or weight.shape[1] < 1:
            raise ValueError(f"conv_weight: got shape {shape_text(weight)}, needs [C, W] with C = {C} and W >= 1")
        if tail is not None:
            require_input("conv_tail", tail, "q", q)
            require_shape("conv_tail", tail, (B, C, weight.shape[1] - 1), "[B, C, W-1]")
    check_rotation(cos, sin, B, T, D, q.device)
    if offset is not None:
        require_input("k_offset", offset, "q", q)
        if offset.dim() != 2 or offset.shape[1] != D or not offset.shape[0] or key_heads % offset.shape[0]:
            raise ValueError(
                f"k_offset: got shape {shape_text(offset)}, needs [H, {D}] with an H that divides {key_heads} key heads"
            )
    require_least("window_heads", window_heads, 0)
    if window_heads > own_heads:
        raise ValueError(f"window_heads: got {window_heads}, needs at most {own_heads}, the heads of k")
    refuse_gradients("prompt_inputs", "causal_conv1d", q, k, v, weight, tail, offset)


def check_gate_values(call: GateValuesCall) -> None:
    """Check the arguments of `gate_values`; raises ValueError or TypeError."""
    a, b, A_log, dt_bias, limit = call
    for name, x in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
        require_input(name, x, "a", a)
    if a.dim() != 3 or 0 in a.shape:
        raise ValueError(f"a: got shape {shape_text(a)}, needs [B, T, H] without empty dimensions")
    require_shape("b", b, tuple(a.shape), "the shape of a")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_shape(name, x, (a.shape[2],), "[H]")
    if limit not in (1, 2):
        raise ValueError(f"limit: got {limit!r}, needs 1 or 2")
    refuse_gradients("gate_values", "the gates of chunk_gated_delta_rule", a, b, A_log, dt_bias)
