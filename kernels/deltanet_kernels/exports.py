"""The public names of `deltanet_kernels`, which imports this module when one of them is first asked for."""

from deltanet_kernels.channel_gates.reference import naive_channel_gated_delta_rule
from deltanet_kernels.common.cumulative_sum import cumulative_sum
from deltanet_kernels.deltaformer.solve import deltaformer_solve
from deltanet_kernels.fla_functions import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from deltanet_kernels.gated_delta_rule.cpu import torch_chunk_gated_delta_rule
from deltanet_kernels.gated_delta_rule.reference import naive_gated_delta_rule
from deltanet_kernels.group_rule.reference import naive_group_gated_delta_rule
from deltanet_kernels.mesa.calls import MesaState
from deltanet_kernels.mesa.recurrent import recurrent_mesa
from deltanet_kernels.mesa.reference import naive_mesa
from deltanet_kernels.operators import (
    causal_conv1d,
    chunk_channel_gated_delta_rule,
    chunk_group_gated_delta_rule,
    chunk_mesa,
    decode_attention,
    fused_recurrent_channel_gated_delta_rule,
    gate_values,
    gated_delta_step_,
    gated_rms_norm,
    group_gated_delta_step_,
    group_gates,
    pack_groups,
    pack_prompt,
    packed_attention,
    packed_part,
    packed_step_,
    prompt_attention,
    prompt_inputs,
    rms_norm,
    round_state,
    round_tokens,
    silu_product,
    window_attention,
    window_keep,
    window_mixture,
    window_step_,
)
from deltanet_kernels.packed_cache.layout import PackedKeyValues
from deltanet_kernels.titans.calls import TitansState
from deltanet_kernels.titans.chunk import chunk_titans
from deltanet_kernels.titans.reference import naive_titans
from deltanet_kernels.ttt.calls import InnerNorm, TTTState
from deltanet_kernels.ttt.chunk import chunk_ttt
from deltanet_kernels.ttt.reference import naive_ttt

__all__ = [
    "InnerNorm",
    "MesaState",
    "PackedKeyValues",
    "TTTState",
    "TitansState",
    "causal_conv1d",
    "chunk_channel_gated_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_group_gated_delta_rule",
    "chunk_mesa",
    "chunk_titans",
    "chunk_ttt",
    "cumulative_sum",
    "decode_attention",
    "deltaformer_solve",
    "fused_recurrent_channel_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "gate_values",
    "gated_delta_step_",
    "gated_rms_norm",
    "group_gated_delta_step_",
    "group_gates",
    "naive_channel_gated_delta_rule",
    "naive_gated_delta_rule",
    "naive_group_gated_delta_rule",
    "naive_mesa",
    "naive_titans",
    "naive_ttt",
    "pack_groups",
    "pack_prompt",
    "packed_attention",
    "packed_part",
    "packed_step_",
    "prompt_attention",
    "prompt_inputs",
    "recurrent_mesa",
    "rms_norm",
    "round_state",
    "round_tokens",
    "silu_product",
    "torch_chunk_gated_delta_rule",
    "window_attention",
    "window_keep",
    "window_mixture",
    "window_step_",
]
