"""The operators of the gated delta rule read at boundaries."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
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


def _chunk():
    from deltanet_kernels.group_rule.chunk import chunk_group_triton

    return chunk_group_triton


def _gates():
    from deltanet_kernels.group_rule.gates import group_gates_triton

    return group_gates_triton


def _step():
    from deltanet_kernels.group_rule.step import group_step_triton_

    return group_step_triton_


def _round():
    from deltanet_kernels.group_rule.round_state import round_state_triton

    return round_state_triton


chunk_group_gated_delta_rule = Operator(
    "chunk_group_gated_delta_rule", GroupRuleCall, check=check_group_rule, cpu=chunk_group_torch, triton=_chunk
)

group_gates = Operator("group_gates", GroupGatesCall, check=check_group_gates, cpu=torch_group_gates, triton=_gates)
"""The gates of a prompt beside a state of what has left its window."""

group_gated_delta_step_ = Operator(
    "group_gated_delta_step_", GroupStepCall, check=check_group_step, cpu=torch_group_step_, triton=_step
)
"""One token beside a state of what has left its window."""

round_state = Operator("round_state", RoundStateCall, check=check_round_state, cpu=torch_round_state, triton=_round)
"""The state that a prompt leaves, in 8 bits."""
