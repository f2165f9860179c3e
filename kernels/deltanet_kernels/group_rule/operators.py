"""The operator of the gated delta rule read at boundaries."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
from deltanet_kernels.group_rule.calls import GroupRuleCall, check_group_rule
from deltanet_kernels.group_rule.cpu import chunk_group_torch


def _chunk():
    from deltanet_kernels.group_rule.chunk import chunk_group_triton

    return chunk_group_triton


chunk_group_gated_delta_rule = Operator(
    "chunk_group_gated_delta_rule", GroupRuleCall, check=check_group_rule, cpu=chunk_group_torch, triton=_chunk
)
