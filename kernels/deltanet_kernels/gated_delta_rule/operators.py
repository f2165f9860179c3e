"""The operators of the gated delta rule: in chunks, by its recurrence, and one decoding step of a layer.

`../fla_functions.py` has the functions that make calls of the first two from the arguments of flash-linear-attention.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.arguments import RuleCall, StepCall
from deltanet_kernels.checks import check_delta_rule
from deltanet_kernels.dispatch import Operator
from deltanet_kernels.gated_delta_rule.cpu import chunked
from deltanet_kernels.gated_delta_rule.cpu_recurrent import torch_recurrent_gated_delta_rule
from deltanet_kernels.gated_delta_rule.cpu_step import torch_gated_delta_step_
from deltanet_kernels.gated_delta_rule.step_checks import check_gated_delta_step


def _chunk():
    from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton

    return chunk_gated_delta_rule_triton


def _recurrent():
    from deltanet_kernels.gated_delta_rule.recurrent import fused_recurrent_gated_delta_rule_triton

    return fused_recurrent_gated_delta_rule_triton


def _step():
    from deltanet_kernels.gated_delta_rule.step import gated_delta_step_triton_

    return gated_delta_step_triton_


chunk_rule = Operator("chunk_gated_delta_rule", RuleCall, check=check_delta_rule, cpu=chunked, triton=_chunk)
recurrent_rule = Operator(
    "fused_recurrent_gated_delta_rule",
    RuleCall,
    check=check_delta_rule,
    cpu=torch_recurrent_gated_delta_rule,
    triton=_recurrent,
)
gated_delta_step_ = Operator(
    "gated_delta_step_", StepCall, check=check_gated_delta_step, cpu=torch_gated_delta_step_, triton=_step
)
