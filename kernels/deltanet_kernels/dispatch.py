"""The only place that chooses between PyTorch (CPU) and Triton (CUDA).

Each public operator (`operators.py` here and in the folders) packs its arguments into one object and checks them once;
both forms take that object. A CUDA call that the Triton kernels do not support runs in PyTorch, and a warning says so
once with the reason.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from deltanet_kernels.common.registration import cached


@cached
def _triton_function(operator: str) -> Callable[..., Any] | None:
    """The Triton form of an operator, or None (with a warning) if it cannot be imported.

    Imported at the first call on CUDA, by import statements: torch.compile traces those and refuses importlib.
    """
    try:
        from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton
        from deltanet_kernels.channel_gates.recurrent import fused_recurrent_channel_gated_delta_rule_triton
        from deltanet_kernels.conv import causal_conv1d_triton
        from deltanet_kernels.feed_forward import silu_product_triton
        from deltanet_kernels.flash_decoding.attention import decode_attention_triton
        from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
        from deltanet_kernels.gated_delta_rule.recurrent import fused_recurrent_gated_delta_rule_triton
        from deltanet_kernels.gated_delta_rule.step import gated_delta_step_triton_
        from deltanet_kernels.mesa.chunk import chunk_mesa_triton
        from deltanet_kernels.norm import gated_rms_norm_triton
        from deltanet_kernels.prompt.gates import gate_values_triton
        from deltanet_kernels.prompt.inputs import prompt_inputs_triton
        from deltanet_kernels.residual_norm import rms_norm_triton
        from deltanet_kernels.window.attention import window_attention_triton
        from deltanet_kernels.window.keep import window_keep_triton
        from deltanet_kernels.window.mixture import window_mixture_triton
        from deltanet_kernels.window.step import window_step_triton_
    except (ImportError, AttributeError, RuntimeError) as error:
        _warn_fallback(operator, f"the Triton kernels cannot be imported: {error}")
        return None
    functions: dict[str, Callable[..., Any]] = {
        "chunk_gated_delta_rule": chunk_gated_delta_rule_triton,
        "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule_triton,
        "chunk_channel_gated_delta_rule": chunk_channel_gated_delta_rule_triton,
        "fused_recurrent_channel_gated_delta_rule": fused_recurrent_channel_gated_delta_rule_triton,
        "chunk_mesa": chunk_mesa_triton,
        "causal_conv1d": causal_conv1d_triton,
        "gated_rms_norm": gated_rms_norm_triton,
        "rms_norm": rms_norm_triton,
        "silu_product": silu_product_triton,
        "decode_attention": decode_attention_triton,
        "gated_delta_step_": gated_delta_step_triton_,
        "window_attention": window_attention_triton,
        "window_keep": window_keep_triton,
        "window_mixture": window_mixture_triton,
        "window_step_": window_step_triton_,
        "prompt_inputs": prompt_inputs_triton,
        "gate_values": gate_values_triton,
    }
    return functions[operator]


@cached
def _warn_fallback(operator: str, reason: str) -> None:
    warnings.warn(
        f"{operator}: CUDA tensors fall back to the much slower PyTorch form ({reason}).",
        RuntimeWarning,
        stacklevel=4,
    )


def call(operator: str, fallback: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the form of an operator for the device of `tensor`; `fallback` is the PyTorch form.

    The Triton form raises NotImplementedError for calls that it does not support.
    """
    if tensor.is_cuda and (function := _triton_function(operator)) is not None:
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            _warn_fallback(operator, str(error))
    return fallback(*args, **kwargs)
