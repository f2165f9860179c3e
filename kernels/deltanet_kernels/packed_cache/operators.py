"""The operators on a packed cache."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
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


def _attention():
    from deltanet_kernels.packed_cache.launches import packed_attention_triton

    return packed_attention_triton


def _step():
    from deltanet_kernels.packed_cache.launches import packed_step_triton_

    return packed_step_triton_


def _pack():
    from deltanet_kernels.packed_cache.launches import pack_groups_triton

    return pack_groups_triton


def _pack_prompt():
    from deltanet_kernels.packed_cache.launches import pack_prompt_triton

    return pack_prompt_triton


def _round():
    from deltanet_kernels.packed_cache.launches import round_tokens_triton

    return round_tokens_triton


def _part():
    from deltanet_kernels.packed_cache.launches import packed_part_triton

    return packed_part_triton


def _prompt_attention():
    from deltanet_kernels.packed_cache.launches import prompt_attention_triton

    return prompt_attention_triton


packed_attention = Operator(
    "packed_attention",
    PackedAttentionCall,
    check=check_packed_attention,
    cpu=torch_packed_attention,
    triton=_attention,
)
packed_step_ = Operator("packed_step_", PackedStepCall, check=check_packed_step, cpu=torch_packed_step_, triton=_step)
pack_groups = Operator("pack_groups", PackGroupsCall, check=check_pack_groups, cpu=torch_pack_groups, triton=_pack)
pack_prompt = Operator(
    "pack_prompt", PackPromptCall, check=check_pack_prompt, cpu=torch_pack_prompt, triton=_pack_prompt
)
round_tokens = Operator(
    "round_tokens", RoundTokensCall, check=check_round_tokens, cpu=torch_round_tokens, triton=_round
)
packed_part = Operator("packed_part", PackedPartCall, check=check_packed_part, cpu=torch_packed_part, triton=_part)
prompt_attention = Operator(
    "prompt_attention",
    PromptAttentionCall,
    check=check_prompt_attention,
    cpu=torch_prompt_attention,
    triton=_prompt_attention,
)
