"""Operators of Gated DeltaNet: PyTorch on CPU, Triton on CUDA. Imports only torch and triton."""

from deltanet_kernels.channel_gates.reference import naive_channel_gated_delta_rule
from deltanet_kernels.deltaformer.solve import deltaformer_solve
from deltanet_kernels.dispatch import (
    causal_conv1d,
    chunk_channel_gated_delta_rule,
    chunk_gated_delta_rule,
    fused_recurrent_channel_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_step_,
    gated_rms_norm,
    window_attention,
    window_step_,
)
from deltanet_kernels.gated_delta_rule.cpu import torch_chunk_gated_delta_rule
from deltanet_kernels.gated_delta_rule.reference import naive_gated_delta_rule

__all__ = [
    "causal_conv1d",
    "chunk_channel_gated_delta_rule",
    "chunk_gated_delta_rule",
    "deltaformer_solve",
    "fused_recurrent_channel_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_step_",
    "gated_rms_norm",
    "naive_channel_gated_delta_rule",
    "naive_gated_delta_rule",
    "torch_chunk_gated_delta_rule",
    "window_attention",
    "window_step_",
]
