"""The Triton forms of the operators, by name; imported at the first call on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton
from deltanet_kernels.channel_gates.recurrent import fused_recurrent_channel_gated_delta_rule_triton
from deltanet_kernels.conv import causal_conv1d_triton
from deltanet_kernels.feed_forward import silu_product_triton
from deltanet_kernels.flash_decoding.attention import decode_attention_triton
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton
from deltanet_kernels.gated_delta_rule.recurrent import fused_recurrent_gated_delta_rule_triton
from deltanet_kernels.gated_delta_rule.step import gated_delta_step_triton_
from deltanet_kernels.group_rule.chunk import chunk_group_triton
from deltanet_kernels.group_rule.gates import group_gates_triton
from deltanet_kernels.group_rule.round_state import round_state_triton
from deltanet_kernels.group_rule.step import group_step_triton_
from deltanet_kernels.mesa.chunk import chunk_mesa_triton
from deltanet_kernels.norm import gated_rms_norm_triton
from deltanet_kernels.packed_cache.launches import (
    pack_groups_triton,
    pack_prompt_triton,
    packed_attention_triton,
    packed_part_triton,
    packed_step_triton_,
    prompt_attention_triton,
    round_tokens_triton,
)
from deltanet_kernels.prompt.gates import gate_values_triton
from deltanet_kernels.prompt.inputs import prompt_inputs_triton
from deltanet_kernels.residual_norm import rms_norm_triton
from deltanet_kernels.window.attention import window_attention_triton
from deltanet_kernels.window.keep import window_keep_triton
from deltanet_kernels.window.mixture import window_mixture_triton
from deltanet_kernels.window.step import window_step_triton_

FORMS: dict[str, Callable[[Any], Any]] = {
    "causal_conv1d": causal_conv1d_triton,
    "gated_rms_norm": gated_rms_norm_triton,
    "rms_norm": rms_norm_triton,
    "silu_product": silu_product_triton,
    "chunk_gated_delta_rule": chunk_gated_delta_rule_triton,
    "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule_triton,
    "gated_delta_step_": gated_delta_step_triton_,
    "chunk_channel_gated_delta_rule": chunk_channel_gated_delta_rule_triton,
    "fused_recurrent_channel_gated_delta_rule": fused_recurrent_channel_gated_delta_rule_triton,
    "chunk_group_gated_delta_rule": chunk_group_triton,
    "group_gates": group_gates_triton,
    "group_gated_delta_step_": group_step_triton_,
    "round_state": round_state_triton,
    "chunk_mesa": chunk_mesa_triton,
    "window_attention": window_attention_triton,
    "window_step_": window_step_triton_,
    "window_mixture": window_mixture_triton,
    "window_keep": window_keep_triton,
    "decode_attention": decode_attention_triton,
    "packed_attention": packed_attention_triton,
    "packed_step_": packed_step_triton_,
    "pack_groups": pack_groups_triton,
    "pack_prompt": pack_prompt_triton,
    "round_tokens": round_tokens_triton,
    "packed_part": packed_part_triton,
    "prompt_attention": prompt_attention_triton,
    "prompt_inputs": prompt_inputs_triton,
    "gate_values": gate_values_triton,
}
