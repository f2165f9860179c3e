"""The operators: of each its name, the class of its calls, their check, and the PyTorch form.

`triton_forms.py` has the Triton forms. `fla_functions.py` has the functions that make calls of `chunk_rule` and
`recurrent_rule` from the arguments of flash-linear-attention. Calls of a recurrence that need gradients are computed in
chunks.
"""

from __future__ import annotations

from deltanet_kernels import checks, reference
from deltanet_kernels.arguments import ConvCall, GatedNormCall, RMSNormCall, RuleCall, SiluProductCall, StepCall
from deltanet_kernels.channel_gates import cpu as channel_gates
from deltanet_kernels.channel_gates.calls import ChannelCall, check_channel_rule
from deltanet_kernels.checks import check_delta_rule
from deltanet_kernels.dispatch import Operator
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall, check_decode_attention
from deltanet_kernels.flash_decoding.reference import torch_decode_attention
from deltanet_kernels.gated_delta_rule.cpu import chunked
from deltanet_kernels.gated_delta_rule.cpu_recurrent import torch_recurrent_gated_delta_rule
from deltanet_kernels.gated_delta_rule.cpu_step import torch_gated_delta_step_
from deltanet_kernels.gated_delta_rule.step_checks import check_gated_delta_step
from deltanet_kernels.group_rule.calls import (
    GroupGatesCall,
    GroupRuleCall,
    GroupStepCall,
    RoundStateCall,
    check_group_gates,
    check_group_rule,
    check_group_step,
    check_round_state,
)
from deltanet_kernels.group_rule.cpu import chunk_group_torch
from deltanet_kernels.group_rule.cpu_step import torch_group_gates, torch_group_step_
from deltanet_kernels.group_rule.rounding import torch_round_state
from deltanet_kernels.mesa.calls import MesaCall, check_mesa
from deltanet_kernels.mesa.cpu import chunk_mesa_torch
from deltanet_kernels.packed_cache.arranged import torch_packed_part
from deltanet_kernels.packed_cache.calls import (
    PackedAttentionCall,
    PackedPartCall,
    PackedStepCall,
    PackGroupsCall,
    PackPromptCall,
    PromptAttentionCall,
    RoundTokensCall,
)
from deltanet_kernels.packed_cache.checks import (
    check_pack_groups,
    check_pack_prompt,
    check_packed_attention,
    check_packed_part,
    check_packed_step,
    check_prompt_attention,
    check_round_tokens,
)
from deltanet_kernels.packed_cache.reference import (
    torch_pack_groups,
    torch_pack_prompt,
    torch_packed_attention,
    torch_packed_step_,
    torch_prompt_attention,
    torch_round_tokens,
)
from deltanet_kernels.prompt.calls import GateValuesCall, PromptInputsCall, check_gate_values, check_prompt_inputs
from deltanet_kernels.prompt.cpu import torch_gate_values, torch_prompt_inputs
from deltanet_kernels.window.calls import (
    WindowCall,
    WindowKeepCall,
    WindowMixtureCall,
    WindowStepCall,
    check_window_attention,
    check_window_keep,
    check_window_mixture,
    check_window_step,
)
from deltanet_kernels.window.cpu import torch_window_attention
from deltanet_kernels.window.cpu_prompt import torch_window_keep, torch_window_mixture
from deltanet_kernels.window.cpu_step import torch_window_step_

causal_conv1d = Operator("causal_conv1d", ConvCall, checks.check_causal_conv1d, reference.torch_causal_conv1d)
gated_rms_norm = Operator("gated_rms_norm", GatedNormCall, checks.check_gated_rms_norm, reference.torch_gated_rms_norm)
rms_norm = Operator("rms_norm", RMSNormCall, checks.check_rms_norm, reference.torch_rms_norm)
silu_product = Operator("silu_product", SiluProductCall, checks.check_silu_product, reference.torch_silu_product)

chunk_rule = Operator("chunk_gated_delta_rule", RuleCall, check_delta_rule, chunked)
recurrent_rule = Operator(
    "fused_recurrent_gated_delta_rule", RuleCall, check_delta_rule, torch_recurrent_gated_delta_rule
)
gated_delta_step_ = Operator("gated_delta_step_", StepCall, check_gated_delta_step, torch_gated_delta_step_)

chunk_channel_gated_delta_rule = Operator(
    "chunk_channel_gated_delta_rule", ChannelCall, check_channel_rule, channel_gates.chunked
)
fused_recurrent_channel_gated_delta_rule = Operator(
    "fused_recurrent_channel_gated_delta_rule", ChannelCall, check_channel_rule, channel_gates.recurrent
)

chunk_group_gated_delta_rule = Operator(
    "chunk_group_gated_delta_rule", GroupRuleCall, check_group_rule, chunk_group_torch
)
group_gates = Operator("group_gates", GroupGatesCall, check_group_gates, torch_group_gates)
group_gated_delta_step_ = Operator("group_gated_delta_step_", GroupStepCall, check_group_step, torch_group_step_)
round_state = Operator("round_state", RoundStateCall, check_round_state, torch_round_state)

chunk_mesa = Operator("chunk_mesa", MesaCall, check_mesa, chunk_mesa_torch)

window_attention = Operator("window_attention", WindowCall, check_window_attention, torch_window_attention)
window_step_ = Operator("window_step_", WindowStepCall, check_window_step, torch_window_step_)
window_mixture = Operator("window_mixture", WindowMixtureCall, check_window_mixture, torch_window_mixture)
window_keep = Operator("window_keep", WindowKeepCall, check_window_keep, torch_window_keep)

decode_attention = Operator("decode_attention", DecodeAttentionCall, check_decode_attention, torch_decode_attention)

packed_attention = Operator("packed_attention", PackedAttentionCall, check_packed_attention, torch_packed_attention)
packed_step_ = Operator("packed_step_", PackedStepCall, check_packed_step, torch_packed_step_)
pack_groups = Operator("pack_groups", PackGroupsCall, check_pack_groups, torch_pack_groups)
pack_prompt = Operator("pack_prompt", PackPromptCall, check_pack_prompt, torch_pack_prompt)
round_tokens = Operator("round_tokens", RoundTokensCall, check_round_tokens, torch_round_tokens)
packed_part = Operator("packed_part", PackedPartCall, check_packed_part, torch_packed_part)
prompt_attention = Operator("prompt_attention", PromptAttentionCall, check_prompt_attention, torch_prompt_attention)

prompt_inputs = Operator("prompt_inputs", PromptInputsCall, check_prompt_inputs, torch_prompt_inputs)
gate_values = Operator("gate_values", GateValuesCall, check_gate_values, torch_gate_values)
